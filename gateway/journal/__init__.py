"""The gateway's journal: the only state that must survive a scheduler or worker, as a pure state machine."""
