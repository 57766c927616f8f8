"""engine batch: JSONL in, JSONL out, against a head, within bounded memory."""
