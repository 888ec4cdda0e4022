"""Float64 truth in numpy: dense, unpaged, sharing no code with any backend."""
