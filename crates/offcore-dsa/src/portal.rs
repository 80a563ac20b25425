//! The door through which descriptors reach a work queue.
