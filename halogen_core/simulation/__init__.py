"""A discrete-event simulator around the real scheduler and block pool, to size a box."""
