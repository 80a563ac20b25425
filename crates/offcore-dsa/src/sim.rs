//! The simulator: a model of the device as the specification has it.
