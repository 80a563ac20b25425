//! Every operation of the device, with the core where the device lacks it.
