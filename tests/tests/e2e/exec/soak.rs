//! nginx under load for a long time while its workers are replaced and killed. At the end, no resources have
//! accumulated.
//!
//! The test takes some seconds. With `OFFCORE_FULL=1` it takes half an hour, and `OFFCORE_SOAK_SECONDS` sets another
//! time.

use std::time::{Duration, Instant};

use offcore_bench::peer::process::Process;
use peers::Need;
use peers::offcore::Signal;
use rustix::process::{Pid, kill_process};

use super::super::http::{curl, url};
use super::super::robust::Before;
use super::super::switch::full;
use super::nginx::{self, PLAIN, Server, Wanted};
use super::{STACK, Stage, children, lives, until};

const WORKERS: usize = 2;
/// Time between two changes of the workers.
const PAUSE: Duration = Duration::from_millis(500);

fn seconds() -> u64 {
    let told = std::env::var("OFFCORE_SOAK_SECONDS").ok().map(|told| told.parse().unwrap());
    told.unwrap_or(if full() { 1800 } else { 5 })
}

/// Sends requests over persistent connections and over single-use ones. Killing a worker ends some of them.
fn ask(stage: &Stage, seconds: u64) -> Process {
    let duration = format!("{seconds}s");
    let url = url(STACK[0], "4096");
    stage.start_beside(&["wrk", "--threads", "1", "--connections", "30", "--duration", &duration, &url])
}

/// Returns the number of answers. All of them must be successful.
fn answered(mut wrk: Process) -> u64 {
    let status = wrk.wait_for_exit(Duration::from_secs(600)).unwrap();
    let report = wrk.stdout_from(0);
    assert!(status.success() && !report.contains("Non-2xx"), "{report}");
    let requests = report.lines().find_map(|line| line.trim().split_once(" requests in ")).unwrap().0;
    requests.parse().unwrap()
}

fn workers(server: &Server) -> Vec<u32> {
    children(server.process.id())
}

/// Replaces the workers.
fn reload(server: &mut Server) {
    let old = workers(server);
    server.process.signal(Signal::HUP).unwrap();
    let are_gone = || !old.iter().any(|&worker| lives(worker));
    until("the old workers' end", are_gone, || server.process.tail());
}

/// Kills one worker.
fn kill(server: &Server) {
    let killed = workers(server)[0];
    kill_process(Pid::from_raw(killed as i32).unwrap(), Signal::KILL).unwrap();
    let is_replaced = || {
        let now = workers(server);
        now.len() == WORKERS && !now.contains(&killed)
    };
    until("a new worker", is_replaced, || server.process.tail());
}

#[test]
fn nginx_worker_restarts_leak_nothing() {
    let Some(stage) = Stage::new(&[Need::Nginx, Need::Curl, Need::Wrk]) else { return };
    let mut server = Wanted { workers: WORKERS as u32, ..PLAIN }.start(&stage);
    let stack = stage.stack.as_ref().unwrap();
    // Allocates everything that stays allocated permanently.
    let wrk = ask(&stage, 2);
    reload(&mut server);
    kill(&server);
    assert!(answered(wrk) > 0);
    std::thread::sleep(PAUSE);
    let before = Before::now(stack);
    let (start, seconds) = (Instant::now(), seconds());
    while start.elapsed().as_secs() < seconds {
        let wrk = ask(&stage, (seconds - start.elapsed().as_secs()).clamp(1, 60));
        let begun = Instant::now();
        let mut round = 0;
        while begun.elapsed() < Duration::from_secs(58) && start.elapsed().as_secs() < seconds {
            std::thread::sleep(PAUSE);
            round += 1;
            if round % 2 == 0 { kill(&server) } else { reload(&mut server) }
        }
        assert!(answered(wrk) >= 10);
        assert!(curl(&stage.netns, &[&url(STACK[0], "65536")]) == nginx::file(65_536));
    }
    before.is_all(stack);
    server.quit();
}
