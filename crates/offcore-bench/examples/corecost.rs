use offcore_bench::{core_cost::Copier, progress::Progress, temperature::Temperature, vhost};
fn main() {
    let a: Vec<String> = std::env::args().collect();
    if a.len() > 1 && a[1] == "sr" {
        offcore_stats::lcore::pin(0).unwrap();
        let other = offcore_bench::lockstep::OtherCore::start(Some(1)).unwrap();
        for len in [64, 512, 1518] {
            let r = offcore_bench::submit_reap::run(len, 20000, &other).unwrap();
            println!("submit_reap {len}: {:?} min {:?} max {:?}", r.median, r.min, r.max);
        }
        return;
    }
    let frames = if a.len() > 1 {
        a[1].split(',').map(|x| x.parse().unwrap()).collect()
    } else {
        vhost::FRAMES.to_vec()
    };
    let temps = if a.len() > 2 {
        a[2].split(',').map(|x| x.parse().unwrap()).collect()
    } else {
        Temperature::ALL.to_vec()
    };
    let blocks = a.get(3).map_or(60, |x| x.parse().unwrap());
    let o = vhost::Options {
        frames,
        temperatures: temps,
        copiers: vec![Copier::Core, Copier::Helper],
        dpdk_lib: cfg!(feature = "dpdk") && std::env::var("NODPDK").is_err(),
        blocks,
        hugepages: offcore_mem::Hugepages::Auto,
        lcore: 0,
        other_lcore: Some(1),
    };
    vhost::run(&o, &Progress::hidden(), &mut |r| println!("{:7} {:5} {:8} {:8} med {:7.1} min {:7.1} max {:7.1} tsc | {:6.1} ns | peer {:?} ratio {:?} low {:?} | empty {:?} eng {:?} rej {} rx {} lost {}", r.temperature, r.frame, r.mode, r.engine, r.median, r.min, r.max, r.ns_per_packet, r.peer_median.map(|x| x.round()), r.peer_ratio.map(|x| (x*100.0).round()/100.0), r.peer_ratio_lower.map(|x| (x*100.0).round()/100.0), r.empty_poll_cycles.map(|x| x.round()), r.engine_ns_per_copy.map(|x| x.round()), r.rejected, r.received, r.lost)).unwrap();
}
