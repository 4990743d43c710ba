"""The scheduler as a pure state machine: no sockets, no clock, no tasks."""
