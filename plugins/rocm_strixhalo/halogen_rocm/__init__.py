"""The Strix Halo backend."""
