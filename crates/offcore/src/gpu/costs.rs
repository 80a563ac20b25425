//! `offcore gpu costs`: measures a GPU's reads of host memory and kernel launches.

use clap::Args;
use offcore_gpu::cuda::Costs;
use offcore_gpu::devices;
use offcore_gpu::host::HOST;

use crate::args::Format;
use crate::failure::Failure;
use crate::output::table::columns;
use crate::output::write;

pub(crate) const EXAMPLES: &str = "\
Examples:
  The costs of the first GPU:
    offcore gpu costs

  One JSON object:
    offcore gpu costs --format json

This command is untested: it has not run on a GPU yet.";

#[derive(Args, Debug)]
pub(crate) struct CostsArgs {
    /// The GPU: cuda:N, or N
    #[arg(short = 'g', long, value_name = "NAME", default_value = "cuda:0")]
    pub device: String,

    /// Text, or a JSON object
    #[arg(long, value_name = "FORMAT", default_value = "table")]
    pub format: Format,
}

pub(crate) fn run(args: &CostsArgs) -> Result<(), Failure> {
    if args.device == HOST {
        return Err("--device host: threads in place of a GPU have no launches: expected cuda:N"
            .to_owned()
            .into());
    }
    let costs = devices::costs(&args.device).map_err(anyhow::Error::new)?;
    let text = match args.format {
        Format::Table => text(&costs),
        Format::Json => serde_json::to_string(&costs).map_err(anyhow::Error::new)? + "\n",
    };
    write(&text)?;
    Ok(())
}

fn text(costs: &Costs) -> String {
    let us = |ns: f64| format!("{:.2} us", ns / 1000.0);
    let kernels = costs.kernels.iter().map(|kernel| {
        [
            kernel.name.into(),
            kernel.registers.to_string(),
            kernel.local_bytes.to_string(),
            kernel.shared_bytes.to_string(),
        ]
    });
    format!(
        "read of pinned host memory  {}\nlaunch call                 {}\nlaunch and wait             {}\n\
         launch call of a graph      {}\n",
        us(costs.read_ns),
        us(costs.launch_ns),
        us(costs.launch_and_wait_ns),
        us(costs.graph_launch_ns),
    ) + &columns("<kernel|registers|local bytes|shared bytes", kernels)
        + "Medians under the best conditions: the same word is read repeatedly, kernels have few parameters, and a\n\
             graph has 8 kernels. registers, local bytes: per thread; shared bytes: per block.\n"
}

#[cfg(test)]
mod tests {
    use offcore_gpu::cuda::KernelCosts;

    use super::*;

    #[test]
    fn kernel_costs_are_printed() {
        let burst = KernelCosts { name: "og_burst", registers: 64, local_bytes: 0, shared_bytes: 20_488 };
        let costs = Costs {
            read_ns: 1123.0,
            launch_ns: 4400.0,
            launch_and_wait_ns: 11_900.0,
            graph_launch_ns: 5200.0,
            kernels: vec![burst],
        };
        let text = text(&costs);
        assert!(text.contains("memory  1.12 us\n") && text.contains("wait             11.90 us"), "{text}");
        assert!(text.contains("og_burst         64            0         20488"), "{text}");
    }
}
