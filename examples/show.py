"""Prints an output file of `engine batch` for reading: prompt, completion, and where each part of the work was done."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path


def text_of(body: dict) -> str:
    choice = body["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def main(path: str, prompts: str | None = None) -> int:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record.get("response") is None:
            print(f"\n## {record.get('custom_id')}: {record['error']['message']}")
            continue
        at = record["engine"]
        print(f"\n## {record['custom_id']}")
        print(textwrap.indent(text_of(record["response"]["body"]).strip(), "    "))
        print(
            f"   [prefill rank {at['prefill_rank']} -> {at['pushed_bytes']:,} bytes pushed ->"
            f" decode rank {at['decode_rank']}; first token {at['ttft_ms']:.0f} ms, total {at['total_ms']:.0f} ms]"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
