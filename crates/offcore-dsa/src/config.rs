//! accel-config profiles, presets and the rules of the specification.
