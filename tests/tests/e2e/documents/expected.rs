//! Requirements of documented commands that a machine may lack, and commands that the test does not run.

/// The error message of a command whose requirement is missing, and the word that the document must have near the
/// command.
pub(super) const MAY_LACK: &[(&str, &str)] = &[
    ("no DSA device", "DSA"),
    ("not found under /sys/bus/dsa/devices", "DSA"),
    ("no work queue is", "DSA"),
    ("keeps DSA from being used", "DSA"),
    ("this offcore was built without DPDK", "--features dpdk"),
    ("--peer dpdk-lib is not in this build", "--features dpdk"),
    ("no CUDA driver was found", "GPU"),
    ("keeps a GPU, or a network card", "GPU"),
    (" steps failed: ", "GPU"),
    ("cannot be used, so the check ends here", "GPU"),
    ("available lcores", " lcores"),
    ("has no zero-copy", "zero-copy"),
    ("it does not answer", "reads"),
    ("accel-config.conf: No such file", "accel-config"),
    ("there is no such directory", "nother machine"),
    ("there is no PCI device", "PCI address"),
    ("programs behind a TAP: ", "PostgreSQL"),
];

/// Prefixes of commands that the test does not run, and the reason.
pub(super) const NOT_RUN: &[(&str, &str)] = &[
    ("cargo ", "what the tests are built and run with"),
    ("nc ", "it waits for what one types"),
    ("qemu-system-x86_64 ", "it needs a disk with a system; the tests of guest boot one of their own"),
    ("cd ", "in a guest"),
    ("scp ", "it needs another machine"),
    ("ethtool ", "it is for a network card"),
    ("examples/nginx/run", "exec::nginx runs it"),
];
