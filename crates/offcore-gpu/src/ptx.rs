//! The kernels as PTX.

/// The PTX of `kernels/kernels.cu`, made by `cargo xtask kernels`.
pub const PTX: &str = include_str!("../kernels/kernels.ptx");

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::doctor::Ptx;

    /// The hash that `cargo xtask kernels` writes: FNV-1a of names and contents, each followed by a zero byte.
    #[test]
    fn ptx_was_made_from_these_sources() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let names =
            fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| name.ends_with(".cu") || name.ends_with(".h")).collect();
        names.sort();
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for name in &names {
            for byte in [name.as_bytes(), &[0], &fs::read(dir.join(name)).unwrap(), &[0]].concat() {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
            }
        }
        let expected = format!("// Sources, with their FNV-1a: {} {hash:016x}", names.join(" "));
        let found = PTX.lines().find(|line| line.starts_with("// Sources"));
        assert_eq!(
            found,
            Some(&*expected),
            "kernels/kernels.ptx is stale: run `cargo xtask kernels --update`"
        );
    }

    #[test]
    fn ptx_runs_from_cuda_12_and_turing_on() {
        let ptx = Ptx::parse(PTX).unwrap();
        assert_eq!((ptx.needs_cuda(), ptx.target), (Some(12_000), (7, 5)));
    }
}
