//! A custom copying stage: a task that keeps the first 64 bytes of every packet, copied by an engine.
//!
//!     cargo run --release -p offcore-flow --example stage

use std::any::Any;

use offcore_dma::core::CoreDevice;
use offcore_dma::{Batch, Begun, Binding, Context, CopyDevice, CopyQueue, Mode, Mover};
use offcore_flow::task::{Task, WakeSource};
use offcore_flow::worker::Worker;
use offcore_mem::{Burst, Hugepages, Packet, Pool};
use offcore_port::generator::GenPort;
use offcore_port::spec::PortSpec;
use offcore_port::{Port, QueueSetup, RxQueue};
use offcore_stats::StageClock;
use offcore_stats::page::StatsPage;

const HEAD: usize = 64;

/// The holder of a copy. It owns the source packet and the destination bytes.
type Kept = Option<(Packet, Vec<u8>)>;

#[derive(Debug)]
struct KeepHeads {
    rx: Box<dyn RxQueue>,
    copies: CopyQueue<Kept>,
    kept: Vec<Vec<u8>>,
}

/// Enters each packet with its copy and submits the batch. Returns the copies that are already complete.
fn submit<const I: bool>(mut batch: Batch<'_, Kept, I>, burst: Burst, clock: &mut StageClock) -> Vec<Kept> {
    let mut complete = Vec::new();
    for packet in burst {
        let mut head = vec![0; packet.len().min(HEAD)];
        batch.copy(packet.data().as_ptr(), head.as_mut_ptr(), head.len() as u32);
        complete.extend(batch.enter(Some((packet, head))));
    }
    // SAFETY: a copy reads its holder's packet and writes its holder's bytes. Neither is accessed before the copy is
    // complete.
    unsafe { batch.submit(clock) };
    complete
}

impl Task for KeepHeads {
    fn round(&mut self, ctx: &mut Context<'_>) -> usize {
        self.drain(ctx);
        let mut plan = self.copies.plan(ctx.mover);
        let most = ctx.burst.min(plan.packets).min(plan.copies);
        let Context { mover, cache, clock, .. } = &mut *ctx;
        let mut burst = Burst::new();
        self.rx.rx(&mut Context { mover, cache, clock, burst: most }, &mut burst);
        let received = burst.len();
        let complete = match self.copies.begin(mover, &mut plan) {
            Begun::Immediate(batch) => submit(batch, burst, clock),
            Begun::Queued(batch) => submit(batch, burst, clock),
        };
        self.kept.extend(complete.into_iter().flatten().map(|(packet, head)| {
            cache.free(packet);
            head
        }));
        received
    }

    fn drain(&mut self, ctx: &mut Context<'_>) -> usize {
        let mut ready = self.copies.ready(ctx.mover);
        let packets = ready.len();
        for (packet, head) in (0..packets).filter_map(|index| ready.holder(index).take()) {
            ctx.cache.free(packet);
            self.kept.push(head);
        }
        ready.retire(packets)
    }

    fn wake_sources<'a>(&'a mut self, each: &mut dyn FnMut(WakeSource<'a>)) {
        each(WakeSource::Queue(&mut *self.rx));
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (pool, stats) = (Pool::new(4096, 2048, Hugepages::Auto)?, StatsPage::new(1 << 16)?);
    let (device, mut engine) = CoreDevice::stepped(); // `CoreDevice::start` would run the engine in a separate thread
    let mut mover = Mover::new();
    let channel = mover.add_channel(device.open_channel(256)?);
    let PortSpec::Gen(spec) = "gen:size=256,count=1000".parse()? else { return Err("no generator".into()) };
    let mut port = GenPort::open(&spec, pool)?;
    let setup = QueueSetup { mover: &mut mover, stats: &stats, binding: Binding::core(), port: "port0" };
    let rx = port.rx_queue(0, setup)?;
    let mut copies = CopyQueue::open(&mut mover, 1024);
    copies.bind(&mut mover, &Binding::new(Mode::Offload, vec![channel]))?;
    let mut worker =
        Worker::new(vec![Box::new(KeepHeads { rx, copies, kept: Vec::new() })], mover, pool.cache());
    for _ in 0..100 {
        worker.round();
        engine.step();
    }
    let kept = (&*worker.tasks[0] as &dyn Any).downcast_ref::<KeepHeads>().map_or(0, |task| task.kept.len());
    println!("{kept} heads kept, {} copied by the core", worker.mover.stats().core_copies);
    Ok(())
}
