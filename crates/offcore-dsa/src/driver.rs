//! Finding work queues, and the copy engine over one of them.
