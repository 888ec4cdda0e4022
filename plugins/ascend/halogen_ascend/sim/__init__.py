"""A strict simulated NPU: own address space, micro-tasks on cores, simulated time only."""
