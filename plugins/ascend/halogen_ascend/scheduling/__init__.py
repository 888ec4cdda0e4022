"""Dynamic batching in simulated time: what a window, priorities and the idle boost really give."""
