//! The kernels as a CUDA driver takes them.

/// The PTX that `cargo xtask kernels` makes of `kernels/kernels.cu`.
pub const PTX: &str = include_str!("../kernels/kernels.ptx");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Ptx;

    #[test]
    fn the_ptx_is_for_every_driver_of_cuda_12_and_for_gpus_from_turing_on() {
        let ptx = Ptx::parse(PTX).unwrap();
        assert_eq!((ptx.needs_cuda(), ptx.target), (Some(12_000), (7, 5)));
    }
}
