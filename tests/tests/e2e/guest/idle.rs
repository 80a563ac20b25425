//! An idle switch sleeps if it was told to, and wakes up for every packet.

use std::time::{Duration, Instant};

use peers::{Netns, Offcore, TempDir, one_core};

use super::{GUEST, HOST, NEEDS, System, iperf_both_ways, ping_both_ways, stop, wait_for_guest};

/// Duration of the measurement.
const WATCHED: Duration = Duration::from_millis(1500);

/// Measures the CPU usage of all threads of a process, in percent of one core.
fn load(offcore: &Offcore) -> f64 {
    let (ticks, start) = (ticks(offcore.id()), Instant::now());
    std::thread::sleep(WATCHED);
    let used = (self::ticks(offcore.id()) - ticks) as f64 / rustix::param::clock_ticks_per_second() as f64;
    100.0 * used / start.elapsed().as_secs_f64()
}

/// Returns the clock ticks of user and system time, fields 14 and 15 of `/proc/PID/stat` (proc(5)).
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // The second field, the program's name, may contain blanks. It ends at the last parenthesis.
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    fields.split(' ').skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum()
}

/// An idle guest uses less than 5 % of a core, and its pings are answered.
fn idle(packed: bool) {
    let Some(core) = one_core(&NEEDS) else { return };
    let (dir, netns) = (TempDir::new().unwrap(), Netns::new().unwrap());
    let system = System { packed, ..System::PLAIN };
    let offcore = system.start(&netns, &dir, &["--idle", "sleep"]);
    let waiting = load(&offcore);
    assert!(waiting < 5.0, "{waiting:.1} % of a core without a guest: {}", offcore.tail());
    let mut guest = system.boot(core.number(), &dir);
    wait_for_guest(&netns);
    ping_both_ways(&netns, &mut guest);
    let idle = load(&offcore);
    assert!(idle < 5.0, "{idle:.1} % of a core with an idle guest: {}", offcore.tail());
    // Each ping arrives at a sleeping switch. A worker sleeps after some milliseconds without packets.
    let text = netns.run("ping", &["-c5", "-i0.2", "-W5", GUEST]).unwrap();
    assert!(text.contains(" 0% packet loss"), "{text}");
    let text = guest.check(&format!("ping -c3 -W5 {}", HOST)).unwrap();
    assert!(text.contains(" 0% packet loss"), "{text}");
    iperf_both_ways(&netns);
    let idle = load(&offcore);
    assert!(idle < 5.0, "{idle:.1} % of a core after its work: {}", offcore.tail());
    stop(offcore, system.copies);
}

tests! {
    fn idle_split_guest_lets_core_sleep() => idle(false);
    fn idle_packed_guest_lets_core_sleep() => idle(true);
}
