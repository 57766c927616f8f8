"""Launch facts: what a kernel's code says of the kernels in front of it: what it reads, writes and lets in, and when.

Read from Triton's code before it is optimised. A kernel that is launched early waits by `griddepcontrol.wait` for the
end of what is in front of it, and lets the next one in by `griddepcontrol.launch_dependents`; what matters is which
accesses to memory come on any way before the first.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

ANYWHERE = "?"
"""In place of an argument: memory whose address is a number that the kernel has read, as in mailboxes."""
READS = re.compile(r"tt\.(load|descriptor_load|descriptor_gather)|ttng?\.async_(tma_)?copy_global_to_local")
WRITES = re.compile(
    r"tt\.(store|atomic_\w+|descriptor_(store|reduce|scatter))|ttng?\.async_tma_(copy_local_to_global|reduce)"
)
ASM_READS = re.compile(r"\b(ld|atom|cp\.async\.bulk\.shared|multimem\.ld\w*)\.")
ASM_WRITES = re.compile(r"\b(st|red|atom)\.(?!shared)")
AND, SAME = {"arith.andi"}, {"tt.splat", "tt.broadcast", "tt.expand_dims", "ttg.convert_layout", "tt.reshape"}
_NAME = re.compile(r"%[\w$.-]+(?:#\d+)?")
_PLACE = re.compile(r" loc\((?:[^()]|\([^()]*\))*\)")
_WAIT = re.compile(r"(^|[;{])\s*griddepcontrol\.wait")
"""Not under a condition."""
_TARGET = re.compile(r"\^(\w+)")


@dataclasses.dataclass
class Facts:
    """What a kernel does; arguments by name.

    Attributes:
        reads_ahead, writes_ahead: before it has waited, on some way.
        writes: at any time.
        waits: on some way.
        lets_in_ahead: it lets the next one in before it has waited, on some way.
    """

    reads_ahead: set[str] = dataclasses.field(default_factory=set)
    writes_ahead: set[str] = dataclasses.field(default_factory=set)
    writes: set[str] = dataclasses.field(default_factory=set)
    waits: bool = False
    lets_in_ahead: bool = False


@dataclasses.dataclass
class _Op:
    """An operation, and the blocks of each of its regions."""

    text: str
    regions: list[dict[str, list[_Op]]] = dataclasses.field(default_factory=list)

    @property
    def body(self) -> str:
        """Without the results."""
        left, equals, right = self.text.partition(" = ")
        return right if equals and left.startswith("%") else self.text

    @property
    def kind(self) -> str:
        return self.body.split(" ", 1)[0].strip('"').split("(", 1)[0].rstrip('"')


def read_facts(code: str) -> Facts:
    """Of the first function in the text of a module, whose values have the names that they have in the source."""
    lines = iter([line.strip() for line in _PLACE.sub("", code).splitlines()])
    for line in lines:
        if line.startswith("tt.func"):
            found = _Reader({f"%{name}": {name} for name in re.findall(r"%([\w$.-]+): !", line)})
            found.follow(_read_region(lines)[0], False)
            return found.facts
    raise ValueError("no function")


def _read_region(lines: Iterator[str]) -> tuple[dict[str, list[_Op]], str]:
    """Blocks by label, up to the brace that closes them; that line."""
    blocks: dict[str, list[_Op]] = {"bb0": []}
    here = blocks["bb0"]
    for line in lines:
        if line.startswith("}"):
            return blocks, line
        if line.startswith("^"):
            label = line[1:].split("(")[0].split(":")[0]
            here = blocks.setdefault(label, []) if any(blocks.values()) else blocks["bb0"]
            blocks.setdefault(label, here)
        elif line:
            op = _Op(line)
            here.append(op)
            closing = line
            while closing.endswith("{"):
                region, closing = _read_region(lines)
                op.regions.append(region)
                op.text += " " + closing
    raise ValueError("the code ends within a function")


class _Reader:
    """Follows the ways through a kernel.

    Of a value, `bases` are the arguments that it may be an address in; `implied`, of one that is a mask, conditions
    without which all of it is false. What is done under such a condition is behind a wait under the same one.
    """

    def __init__(self, bases: dict[str, set[str]]) -> None:
        self.facts = Facts()
        self._bases = bases
        self._implied: dict[str, set[str]] = {}
        self._waits_if: set[str] = set()

    def follow(self, blocks: dict[str, list[_Op]], waited: bool) -> bool:
        """A region that is begun with this; whether it was waited for on each way to its end."""
        before: dict[str, list[bool]] = {label: [] for label in blocks}
        first = next(iter(blocks))
        before[first] = [waited]
        ends = []
        for label, ops in blocks.items():
            # Blocks that no way leads to are followed as if all had been waited for.
            here = all(before[label])
            for op in ops:
                here = self._take(op, here)
            targets = _TARGET.findall(ops[-1].text) if ops and ops[-1].kind in ("cf.br", "cf.cond_br") else []
            for target in targets:
                before[target].append(here)
            if not targets:
                ends.append(here)
        return all(ends)

    def _take(self, op: _Op, waited: bool) -> bool:
        names = _NAME.findall(re.sub(r'"[^"]*"', "", op.body))
        bases: set[str] = set().union(*(self._find(name) for name in names))
        if op.regions:
            for inside, outside in re.findall(r"(%[\w$.-]+) = (%[\w$.#-]+)", op.body):
                self._bases[inside] = self._find(outside)
        kind = op.kind
        if "inline_asm" in kind:
            asm = re.findall(r'"([^"]*)"', op.body)[0]
            if _WAIT.search(asm):
                self.facts.waits = True
                return True
            if "griddepcontrol.launch_dependents" in asm:
                self.facts.lets_in_ahead |= not waited
            self._access(bases, ASM_READS.search(asm), ASM_WRITES.search(asm), waited)
        else:
            at = self._find(names[0]) if names else set()
            # A mask comes last, or before what is in place of what it hides.
            is_behind = waited or any(self._implied.get(name, {name}) & self._waits_if for name in names[1:])
            self._access(at, READS.fullmatch(kind), WRITES.fullmatch(kind), is_behind)
        after = waited
        is_known = kind == "scf.if" and names[0] in self._waits_if
        outs = [self.follow(region, waited or (is_known and not at)) for at, region in enumerate(op.regions)]
        if kind == "scf.if":
            after = all(outs) if len(outs) == 2 else waited and all(outs)
            if outs[0]:
                self._waits_if.add(names[0])
        elif kind == "scf.while":
            after = outs[0]
        for region in op.regions:
            for ops in region.values():
                if ops and ops[-1].kind in ("scf.yield", "scf.condition"):
                    bases |= set().union(*(self._find(name) for name in _NAME.findall(ops[-1].body)))
        if " = " in op.text and op.text.startswith("%"):
            result = op.text.split(" = ")[0].split(":")[0]
            if kind in AND or kind in SAME:
                self._implied[result] = {result}.union(*(self._implied.get(name, {name}) for name in names))
            # What was read is no address in what it was read from.
            self._bases[result] = set() if READS.fullmatch(kind) or kind.startswith("tt.atomic") else bases
        return after

    def _find(self, name: str) -> set[str]:
        return self._bases.get(name.split("#")[0], set())

    def _access(self, bases: set[str], reads: object, writes: object, waited: bool) -> None:
        where = bases or {ANYWHERE}
        if reads and not waited:
            self.facts.reads_ahead |= where
        if writes:
            self.facts.writes |= where
            if not waited:
                self.facts.writes_ahead |= where
