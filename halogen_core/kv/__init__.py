"""The KV block manager: ids, references, prefix cache, eviction, tiers. No torch."""
