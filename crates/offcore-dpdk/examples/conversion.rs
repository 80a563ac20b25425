//! Prints the cost of the conversion between mbufs and packet handles: `cargo run --release -p offcore-dpdk --features
//! dpdk --example conversion`.

#[cfg(feature = "dpdk")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cost = offcore_dpdk::measure::measure_conversion(101)?;
    println!("TSC cycles a packet, rx + tx, bursts of 32:");
    println!("{:6.1}  the conversion loops alone", cost.loops);
    println!("{:6.1}  net_null through the port's queues", cost.port);
    println!("{:6.1}  net_null by DPDK's calls, the same mempool", cost.bare);
    println!("{:6.1}  the difference of the two", cost.added());
    Ok(())
}

#[cfg(not(feature = "dpdk"))]
fn main() {
    eprintln!("built without DPDK: cargo run --release -p offcore-dpdk --features dpdk --example conversion");
}
