"""KV cache: `pool` holds the bytes (torch), `allocator` counts pages (no torch). Imports nothing itself."""
