"""Engram: the n-gram memory that is added to the residual streams of a few layers.

Owns the folding of a vocabulary into classes, the hash constants, the table rows of each token, and the gate. Rows
depend on token ids alone, so they can be computed, and fetched, for a whole step ahead of it.

Order of a token's rows: all heads of the 2-grams, then of the 3-grams, and so on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ConfigError
from engine.model.layers import WeightMap, linear, rms_norm
from engine.model.shapes import EngramShape, ModelShape

_SEED_STEP = 10007
_REPLACEMENT = "\ufffd"
# Stands for a lone space while the others are stripped; a private character, so no vocabulary text holds it.
_LONE_SPACE = "\ue000"


@dataclass(frozen=True)
class EngramTables:
    """Constants of one model's n-gram memory, made once per vocabulary by `engram_tables`.

    Attributes:
        layers: layers with a memory, ascending; the first dimension of the arrays below.
        token_map: int64[vocab], folded id of every token.
        pad_folded: folded id that stands for missing positions.
        multipliers: int64[layers, max_ngram], odd.
        primes: int64[layers, rows], bucket count of each order and head.
        offsets: int64[layers, rows], first table row of each bucket range.
    """

    layers: tuple[int, ...]
    token_map: Tensor
    pad_folded: int
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    @property
    def history(self) -> int:
        """Earlier token ids that a token's rows depend on."""
        return self.multipliers.shape[1] - 1


def fold_vocabulary(strings: Sequence[str], raw: Sequence[str] | None = None) -> np.ndarray:
    """Number the classes of a vocabulary under the memory's text normalisation.

    Args:
        strings: the text of every token id, in id order.
        raw: the vocabulary's own spelling of every id. A token that is a broken byte sequence (its text holds U+FFFD)
            is told apart by it; without it such tokens are told apart by their text only.

    Returns:
        int64[vocab], classes numbered by first appearance.
    """
    # The vendor's own normaliser library: another one's Unicode tables would shift every later class number.
    from tokenizers import Regex, normalizers

    normaliser = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
    spellings = strings if raw is None else raw
    key_to_class: dict[str, int] = {}
    folded = []
    for text, spelling in zip(strings, spellings, strict=True):
        # A broken byte sequence has no text to normalise, an empty result has no text to go by.
        key = spelling if _REPLACEMENT in text else normaliser.normalize_str(text) or text
        folded.append(key_to_class.setdefault(key, len(key_to_class)))
    return np.array(folded, dtype=np.int64)


def fold_tokenizer(path: Path, vocab_size: int) -> np.ndarray:
    """Fold the vocabulary of a `tokenizer.json`: int64[vocab_size]. Ids that it lacks share one class."""
    from tokenizers import Tokenizer

    if not path.is_file():
        raise ConfigError(f"{path} does not exist; the n-gram memory needs the tokenizer beside the weights")
    tokenizer = Tokenizer.from_file(str(path))
    ids = range(vocab_size)
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    return fold_vocabulary(texts, [tokenizer.id_to_token(token) or "" for token in ids])


def hash_multipliers(layer: int, max_ngram: int, num_classes: int) -> np.ndarray:
    """The odd multipliers of one layer, int64[max_ngram]; a product with a folded id stays below 2^63."""
    bound = max(1, int(np.iinfo(np.int64).max) // num_classes // 2)
    draws = np.random.default_rng(_SEED_STEP * layer).integers(0, bound, size=max_ngram, dtype=np.int64)
    return draws * 2 + 1


def hash_primes(engram: EngramShape) -> np.ndarray:
    """Bucket counts int64[layers, rows]: successive primes from `bucket_base` on, none used twice."""
    wanted = len(engram.layers) * engram.rows_per_token
    found: list[int] = []
    candidate = engram.bucket_base
    while len(found) < wanted:
        if _is_prime(candidate):
            found.append(candidate)
        candidate += 1
    return np.array(found, dtype=np.int64).reshape(len(engram.layers), engram.rows_per_token)


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    if number % 2 == 0:
        return False
    return all(number % divisor for divisor in range(3, int(number**0.5) + 2, 2))


def load_tables(directory: Path, shape: ModelShape) -> EngramTables | None:
    """Constants of the checkpoint in `directory`, or None for a model without a memory.

    A checkpoint may carry the folding that it was trained with (`engram.safetensors`, `token_map` int32[vocab]);
    without that file the vocabulary of `tokenizer.json` is folded by the vendor's rule.

    Raises:
        ConfigError: the file can not be read, or does not fit the model.
    """
    if shape.engram is None:
        return None
    carried = Path(directory) / "engram.safetensors"
    if carried.exists():
        try:
            with safe_open(carried, framework="pt") as file:
                if "token_map" not in file.keys():  # noqa: SIM118 - not a dict
                    raise ConfigError(f"{carried} has no tensor `token_map`")
                return engram_tables(shape, file.get_tensor("token_map"))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{carried} is not a readable safetensors file: {error}") from error
    return engram_tables(shape, fold_tokenizer(Path(directory) / "tokenizer.json", shape.vocab_size))


def engram_tables(shape: ModelShape, token_map: np.ndarray | Tensor) -> EngramTables:
    """Compute the hash constants of a model and tie them to its vocabulary.

    Args:
        shape: a model with an n-gram memory.
        token_map: int[vocab], see `fold_vocabulary`.

    Raises:
        ConfigError: the vocabulary or a table does not have the size that the configuration states.
    """
    engram = shape.engram
    if engram is None:
        raise ConfigError("text_config.engram_layer_ids is empty: the model has no n-gram memory")
    folded = torch.as_tensor(np.asarray(token_map).astype(np.int64))
    if folded.shape != (shape.vocab_size,):
        raise ConfigError(f"token map must have {shape.vocab_size} entries (vocab_size), found {list(folded.shape)}")
    num_classes = int(folded.max()) + 1
    if num_classes != engram.num_classes:
        wanted = engram.num_classes
        raise ConfigError(
            f"text_config.engram_compressed_vocab_size is {wanted}, but the vocabulary folds to {num_classes} classes"
        )
    primes = hash_primes(engram)
    for layer, rows, total in zip(engram.layers, engram.num_rows, primes.sum(1).tolist(), strict=True):
        if rows < total:
            raise ConfigError(
                f"text_config.engram_num_embeddings of layer {layer} must be at least {total}, found {rows}"
            )
    multipliers = np.stack([hash_multipliers(layer, engram.max_ngram, num_classes) for layer in engram.layers])
    return EngramTables(
        layers=engram.layers,
        token_map=folded,
        pad_folded=int(folded[engram.pad_token_id]),
        multipliers=torch.from_numpy(multipliers),
        primes=torch.from_numpy(primes),
        offsets=torch.from_numpy(np.cumsum(primes, 1) - primes),
    )


def folded_context(tables: EngramTables, tokens: Tensor, earlier: Tensor | None = None) -> Tensor:
    """Folded ids of each position and of the positions before it.

    Args:
        tables: the model's constants.
        tokens: int64[batch, length]; a negative id marks a position without text (image, padding).
        earlier: int64[batch, history], the ids just before `tokens`, -1 where there is none; None at the start.

    Returns:
        int64[batch, length, history + 1]; entry i is the folded id i positions back. A negative id,
        and everything further back, reads as `pad_folded`.
    """
    history = tables.history
    if earlier is None:
        earlier = tokens.new_full((tokens.shape[0], history), -1)
    ids = torch.cat((earlier, tokens), 1)
    valid = ids >= 0
    folded = tables.token_map.to(tokens.device)[ids.clamp(min=0)]
    length = tokens.shape[1]
    columns = []
    reachable = torch.ones_like(tokens, dtype=torch.bool)
    for back in range(history + 1):
        start = history - back
        reachable = reachable & valid[:, start : start + length]
        columns.append(folded[:, start : start + length].masked_fill(~reachable, tables.pad_folded))
    return torch.stack(columns, -1)


def table_rows(tables: EngramTables, layer: int, context: Tensor) -> Tensor:
    """Rows of one layer's table.

    Args:
        tables: the model's constants.
        layer: one of `tables.layers`.
        context: int64[..., history + 1], see `folded_context`.

    Returns:
        int64[..., rows per token].
    """
    slot = tables.layers.index(layer)
    device = context.device
    multipliers = tables.multipliers[slot].to(device)
    orders = tables.history
    primes = tables.primes[slot].to(device).view(orders, -1)
    offsets = tables.offsets[slot].to(device).view(orders, -1)
    running = context[..., 0] * multipliers[0]
    rows = []
    for order in range(1, orders + 1):
        running = running ^ (context[..., order] * multipliers[order])
        rows.append(running.unsqueeze(-1) % primes[order - 1] + offsets[order - 1])
    return torch.cat(rows, -1)


def read_memory(weights: WeightMap, prefix: str, rows: Tensor) -> Tensor:
    """Gather and concatenate table rows: int64[..., rows] to float[..., rows * head_dim]."""
    return F.embedding(rows, weights[f"{prefix}.embed.weight"]).flatten(-2)


def add_memory(weights: WeightMap, prefix: str, shape: ModelShape, streams: Tensor, memory: Tensor) -> Tensor:
    """Add the memory to the streams, each through a gate of its own.

    Args:
        weights: vendor-named tensors.
        prefix: for example `layers.1.engram`.
        shape: the model.
        streams: float[..., streams, hidden].
        memory: float[..., rows * head_dim], see `read_memory`.

    Returns:
        float[..., streams, hidden] in the streams' dtype; gate and sum in float32.
    """
    projected = linear(memory, weights[f"{prefix}.wkv.weight"]).unflatten(-1, (shape.num_streams + 1, shape.hidden))
    keys, value = projected[..., : shape.num_streams, :], projected[..., shape.num_streams :, :]
    query = rms_norm(streams.float(), weights[f"{prefix}.q_weight"], shape.norm_eps)
    key = rms_norm(keys.float(), weights[f"{prefix}.k_weight"], shape.norm_eps)
    match = (query * key).sum(-1, keepdim=True) / shape.hidden**0.5
    # The signed root flattens large matches; its argument is kept off zero, where the root has no slope.
    gate = torch.sigmoid(match.sign() * match.abs().clamp(min=1e-6).sqrt())
    return (streams.float() + gate * value.float()).to(streams.dtype)
