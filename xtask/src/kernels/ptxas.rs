//! Parser for the output of `ptxas --verbose`: the resources of each kernel, and complaints.

use std::fmt;

/// The heading of a table. Each row has an architecture, 6 columns wide, and a [`Kernel`].
pub(super) const HEADING: &str =
    "       kernel                            registers  shared   stack  spilled  (bytes)";

/// A kernel's resources on one architecture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Kernel {
    name: String,
    registers: u32,
    /// Shared memory of a block in bytes, without dynamic shared memory of a launch.
    shared: u32,
    /// A thread's stack frame in bytes.
    stack: u32,
    /// Bytes that a thread spills to memory for lack of registers, stores and loads together.
    spilled: u32,
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, registers, shared, stack, spilled } = self;
        write!(f, "{name:<32} {registers:>10} {shared:>7} {stack:>7} {spilled:>8}")
    }
}

/// Registers per thread at the maximum block size: 1024 threads share 65536.
const REGISTERS: u32 = 64;

impl Kernel {
    /// Returns a message if the kernel uses too many resources on `architecture`.
    pub(super) fn too_much(&self, architecture: &str) -> Option<String> {
        let Self { name, registers, spilled, .. } = self;
        let what = if *registers > REGISTERS {
            format!("{registers} registers: at most {REGISTERS}, or a block of 1024 threads is not launched")
        } else if *spilled > 0 {
            format!("{spilled} bytes spilled: none, or a thread waits for memory where it need not")
        } else {
            return None;
        };
        Some(format!("{name} on {architecture} has {what}"))
    }
}

/// Returns the kernels in ptxas's output by name.
pub(super) fn kernels(said: &str) -> Vec<Kernel> {
    let mut kernels: Vec<Kernel> = Vec::new();
    // The output also lists functions that were not inlined.
    let mut of_kernel = false;
    for line in said.lines() {
        let line = line.strip_prefix("ptxas info    : ").unwrap_or(line).trim();
        if let Some(rest) = line.strip_prefix("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or(rest).to_owned();
            kernels.push(Kernel { name, ..Kernel::default() });
            continue;
        }
        let Some(kernel) = kernels.last_mut() else { continue };
        if let Some(name) = line.strip_prefix("Function properties for ") {
            of_kernel = name == kernel.name;
        } else if let Some(used) = line.strip_prefix("Used ") {
            kernel.registers = amount(used, "registers");
            kernel.shared = amount(used, "bytes smem");
        } else if of_kernel && line.contains("bytes stack frame") {
            kernel.stack = amount(line, "bytes stack frame");
            kernel.spilled = amount(line, "bytes spill stores") + amount(line, "bytes spill loads");
        }
    }
    kernels.sort_by(|a, b| a.name.cmp(&b.name));
    kernels
}

/// Returns the number before `unit` in a comma-separated list, or 0 if it is missing.
fn amount(list: &str, unit: &str) -> u32 {
    list.split(',').find_map(|part| part.trim().strip_suffix(unit)?.trim().parse().ok()).unwrap_or(0)
}

/// Returns the lines of ptxas's output that are warnings or errors: `ptxas FILE, line 7; error   : ...`, `ptxas fatal
/// : ...`.
pub(super) fn complaints(said: &str) -> Vec<&str> {
    said.lines().filter(|line| line.starts_with("ptxas ") && !line.starts_with("ptxas info ")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "\
ptxas info    : 304 bytes gmem
ptxas info    : Compiling entry function 'og_two' for 'sm_80'
ptxas info    : Function properties for og_helper
    96 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
ptxas info    : Function properties for og_two
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, 8196 bytes smem, 360 bytes cmem[0]
ptxas info    : Compiling entry function 'og_one' for 'sm_80'
ptxas info    : Function properties for og_one
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 13 registers, used 1 barriers
";

    #[test]
    fn kernels_are_read_by_name() {
        assert_eq!(
            kernels(SAID),
            [
                Kernel { name: "og_one".to_owned(), registers: 13, ..Kernel::default() },
                Kernel { name: "og_two".to_owned(), registers: 255, shared: 8196, stack: 16, spilled: 20 },
            ]
        );
        assert!(complaints(SAID).is_empty());
    }

    #[test]
    fn spills_and_lacking_registers_are_found() {
        let found = |registers, spilled| Kernel { registers, spilled, ..Kernel::default() }.too_much("sm_80");
        assert_eq!(found(64, 0), None);
        assert!(found(65, 0).unwrap().contains("sm_80 has 65 registers"));
        assert!(found(32, 4).unwrap().contains("4 bytes spilled"));
    }

    #[test]
    fn ptxas_errors_are_extracted() {
        let said = "ptxas a:b.ptx, line 74; error   : Not a name of any known instruction: 'bru'\n\
            ptxas fatal   : Ptx assembly aborted due to errors\n";
        assert_eq!(kernels(said), []);
        assert_eq!(complaints(said), said.lines().collect::<Vec<_>>());
        assert_eq!(
            complaints("ptxas warning : Stack size cannot be determined\nptxas info    : error\n").len(),
            1
        );
    }

    #[test]
    fn columns_align_with_heading() {
        let row = format!("{:<6} {}", "sm_80", kernels(SAID)[1]);
        for (value, title) in [("255", "registers"), ("8196", "shared"), ("16", "stack"), ("20", "spilled")] {
            let end = |text: &str, part: &str| text.find(&format!(" {part}")).unwrap() + part.len();
            assert_eq!(end(&row, value), end(HEADING, title), "{title}\n{HEADING}\n{row}");
        }
    }
}
