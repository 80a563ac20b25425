//! Applications of one stack: each has its own memory, and none is affected by the others.

use std::sync::Arc;

use offcore_session::datagram::Header;
use offcore_session::{Datagrams, Segment, Segments, Wanted};
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppId, AppMemory, CallError, Config, ConnId, Event, HEAD, Out, Stack};

use crate::host::Host;
use crate::streams::content;
use crate::world::World;

const SECOND: Micros = Micros::from_secs(1);
const MEGABYTE: usize = 1 << 20;

fn world() -> World {
    World::new(1, 1500, Config::default())
}

/// Connects an application of host 0 to `port` of host 1, and returns both ends.
fn connect(world: &mut World, app: AppId, port: u16) -> [ConnId; 2] {
    let now = world.now;
    let here = world.hosts[0].connect_for(app, now, &format!("10.0.0.2:{port}"));
    assert!(world.run_until(SECOND, |hosts| !hosts[1].accepted.is_empty()));
    [here, world.hosts[1].accepted.pop().unwrap()]
}

fn listen(host: &mut Host, app: AppId, port: u16) -> u32 {
    host.stack.listen(app, None, port, 64, false).unwrap()
}

fn set_appetite(host: &mut Host, conn: ConnId, appetite: usize) {
    host.sessions.get_mut(&conn).unwrap().appetite = appetite;
}

#[test]
fn applications_have_separate_memory() {
    let mut world = world();
    let apps =
        [(); 2].map(|()| world.hosts[1].stack.add_app(AppMemory::new(4 * MEGABYTE, Arc::default()).unwrap()));
    let ends: Vec<[ConnId; 2]> = [7, 8]
        .into_iter()
        .zip(apps)
        .map(|(port, app)| {
            listen(&mut world.hosts[1], app, port);
            connect(&mut world, AppId::OWN, port)
        })
        .collect();
    let used = |host: &Host| [AppId::OWN, apps[0], apps[1]].map(|app| host.stack.memory_used_by(app));
    let before = used(&world.hosts[1]);
    for (app, ends) in apps.into_iter().zip(&ends) {
        let stack = &world.hosts[1].stack;
        assert_eq!((stack.app(ends[1]), stack.info(ends[1]).unwrap().app), (Some(app), app));
        set_appetite(&mut world.hosts[1], ends[1], 0);
    }
    assert!(!Arc::ptr_eq(world.hosts[1].stack.memory(apps[0]), world.hosts[1].stack.memory(apps[1])));
    let now = world.now;
    world.hosts[0].send(now, ends[0][0], &content(1, 200_000));
    world.hosts[1].send(now, ends[0][1], &content(2, 100_000));
    world.run(SECOND);
    let after = used(&world.hosts[1]);
    assert_eq!((after[0], after[2]), (before[0], before[2]), "others' memory is as it was");
    assert!(after[1] >= before[1] + 200_000, "{before:?} {after:?}");
    assert_eq!(world.hosts[1].stack.memory_used(), after.into_iter().sum());
    assert_eq!(world.hosts[1].stack.counts().memory_used, after.into_iter().sum::<usize>() as u64);
    set_appetite(&mut world.hosts[1], ends[0][1], usize::MAX);
    let now = world.now;
    world.hosts[1].read(now, ends[0][1]);
    world.run(SECOND);
    assert!(world.hosts[1].sessions[&ends[0][1]].received == content(1, 200_000));
    assert!(world.hosts[0].sessions[&ends[0][0]].received == content(2, 100_000));
}

/// Measures an application while another one hoards memory. The hoarder at host 1 reads nothing, and the one at host 0
/// gets no acknowledgements, until both have no memory left. Returns the duration of the measured application's stream,
/// and the number of bytes that fit into a quiet connection.
fn measure_with_hoarder(hoards: bool, apart: bool) -> (Micros, usize) {
    let mut world = world();
    let mut apps = || {
        let other = [0, 1].map(|host: usize| {
            world.hosts[host].stack.add_app(AppMemory::new(MEGABYTE, Arc::default()).unwrap())
        });
        let greedy = [0, 1].map(|host: usize| {
            world.hosts[host].stack.add_app(AppMemory::new(MEGABYTE, Arc::default()).unwrap())
        });
        (other, if apart { greedy } else { other })
    };
    let (other, greedy) = apps();
    listen(&mut world.hosts[1], greedy[1], 7);
    listen(&mut world.hosts[1], other[1], 8);
    let quiet = connect(&mut world, other[0], 8);
    let stream = connect(&mut world, other[0], 8);
    if hoards {
        let ends = [(); 40].map(|()| connect(&mut world, greedy[0], 7));
        for [here, there] in ends {
            set_appetite(&mut world.hosts[1], there, 0);
            let now = world.now;
            world.hosts[0].send(now, here, &content(3, MEGABYTE));
        }
    }
    world.run(5 * SECOND);
    let space = world.hosts[0].sessions[&quiet[0]].writer.space();
    let (bytes, began) = (content(4, 3_000_000), world.now);
    world.hosts[0].send(began, stream[0], &bytes);
    let all = |hosts: &mut [Host; 2]| hosts[1].sessions[&stream[1]].received.len() == bytes.len();
    assert!(world.run_until(600 * SECOND, all));
    assert!(world.hosts[1].sessions[&stream[1]].received == bytes);
    (world.now - began, space)
}

#[test]
fn greedy_application_spares_others() {
    let alone = measure_with_hoarder(false, true);
    assert_eq!(measure_with_hoarder(true, true), alone);
    // Counter-check: the measurement changes if both use the same memory.
    let (time, space) = measure_with_hoarder(true, false);
    assert!(time > 2 * alone.0 && space < alone.1, "{time:?}, {space} bytes; alone {alone:?}");
}

#[test]
fn removed_application_still_sends() {
    for latency in [0, 200] {
        let mut world = world();
        listen(&mut world.hosts[1], AppId::OWN, 7);
        let app = world.hosts[0].stack.add_app(AppMemory::new(4 * MEGABYTE, Arc::default()).unwrap());
        let listener = listen(&mut world.hosts[0], app, 9);
        let socket = world.hosts[0].stack.open_datagrams(app, None, 9).unwrap();
        let [here, there] = connect(&mut world, app, 7);
        let memory = Arc::downgrade(world.hosts[0].stack.memory(app));
        let bytes = content(5, 400_000);
        world.hosts[0].latency = latency;
        let now = world.now;
        world.hosts[0].send(now, here, &bytes);
        let written = |hosts: &mut [Host; 2]| hosts[0].sessions[&here].sent == bytes.len();
        assert!(world.run_until(SECOND, written));
        assert!(world.hosts[1].sessions[&there].received.len() < bytes.len(), "it is on its way");
        world.hosts[1].close_after(now, there);
        let Host { stack, out, .. } = &mut world.hosts[0];
        stack.remove_app(app);
        stack.close(now, socket, out);
        stack.unlisten(now, listener, out);
        world.hosts[0].release(now, here);
        let (now, to) = (world.now, "10.0.0.2:7".parse().unwrap());
        let Host { stack, out, .. } = &mut world.hosts[0];
        assert_eq!(stack.connect(now, app, None, to, out), Err(CallError::NoApp));
        assert_eq!(stack.listen(app, None, 9, 1, false), Err(CallError::NoApp));
        assert_eq!(stack.open_datagrams(app, None, 9), Err(CallError::NoApp));
        let other = stack.add_app(AppMemory::new(MEGABYTE, Arc::default()).unwrap());
        assert!(other != app && memory.upgrade().is_some(), "its number is not free, nor is its memory");
        let all = |hosts: &mut [Host; 2]| hosts[1].sessions[&there].received.len() == bytes.len();
        assert!(world.run_until(60 * SECOND, all));
        assert!(world.hosts[1].sessions[&there].received == bytes);
        world.run(SECOND);
        assert!(memory.upgrade().is_none(), "its memory is unmapped");
        let stack = &mut world.hosts[0].stack;
        assert_eq!(
            stack.add_app(AppMemory::new(MEGABYTE, Arc::default()).unwrap()),
            app,
            "another one has its number"
        );
        stack.remove_app(AppId::OWN);
        assert!(stack.open_datagrams(AppId::OWN, None, 0).is_ok(), "the stack's own process stays");
    }
}

#[test]
fn idle_application_is_removed_immediately() {
    let stack = &mut world().hosts[0].stack;
    let before = stack.counts();
    let app = stack.add_app(AppMemory::new(4 * MEGABYTE, Arc::default()).unwrap());
    assert_eq!(stack.counts().memory, before.memory + (4 << 20));
    let memory = Arc::downgrade(stack.memory(app));
    stack.remove_app(app);
    assert!(memory.upgrade().is_none());
    assert_eq!(stack.counts(), before);
    stack.remove_app(app);
    assert_eq!(stack.add_app(AppMemory::new(MEGABYTE, Arc::default()).unwrap()), app);
}

#[test]
fn waiting_socket_gets_freed_memory() {
    // No copy or packet of the socket is in flight, so no completion would trigger the search for memory.
    let mut world = world();
    let Host { stack, .. } = &mut world.hosts[0];
    let app = stack.add_app(AppMemory::new(MEGABYTE, Arc::default()).unwrap());
    let mut out = Out::default();
    // Each socket requests a large block. The memory has 16 of them.
    let sockets = [(); 16].map(|()| {
        let socket = stack.open_datagrams(app, None, 0).unwrap();
        let memory = Arc::clone(stack.memory(app));
        let _ = memory.slot(stack.slot(socket).unwrap()).unwrap().want(60_000);
        stack.written(Time::from_secs(1), socket, &mut out).unwrap();
        socket
    });
    stack.want_room(sockets[15]);
    stack.timers(Time::from_secs(1), &mut out);
    assert_eq!(out.events, [], "there is none");
    assert!(stack.deadline(Time::from_secs(1)).is_some_and(|due| due <= Time::from_secs(2)));
    stack.close(Time::from_secs(1), sockets[0], &mut out);
    stack.timers(Time::from_secs(1), &mut out);
    assert_eq!(out.events, [Event::Writable(sockets[15])]);
}

#[test]
fn idle_socket_keeps_small_block() {
    let mut world = world();
    let Host { stack, .. } = &mut world.hosts[0];
    let app = stack.add_app(AppMemory::new(16 * MEGABYTE, Arc::default()).unwrap());
    let mut out = Out::default();
    let before = stack.memory_used_by(app);
    let mut now = Time::from_secs(1);
    for _ in 0..2000 {
        let socket = stack.open_datagrams(app, None, 0).unwrap();
        let memory = Arc::clone(stack.memory(app));
        let mut datagrams = Datagrams::new(&memory, stack.slot(socket).unwrap()).unwrap();
        let header = Header::new(9000, "10.0.0.2:9".parse().unwrap(), [10, 0, 0, 1].into());
        // The first attempt requests room, and the second one finds it.
        for has_room in [false, true] {
            assert_eq!(datagrams.send(&header, &[7; 9000]), has_room);
            stack.written(now, socket, &mut out).unwrap();
        }
        stack.tx(now, 64, &mut out);
        assert_eq!(out.plans.len(), 1, "it is sent");
        for plan in out.plans.drain(..) {
            let mut headers = [0; HEAD];
            stack.seal_datagram(now, &plan, None, &mut headers, &mut Out::default()).unwrap();
        }
        // The socket becomes idle after a second.
        now += SECOND / 50;
        stack.timers(now, &mut out);
        out.clear();
    }
    let each = (stack.memory_used_by(app) - before) / 2000;
    assert!(each < 8 << 10, "{each} bytes");
}

#[test]
fn listeners_share_a_port() {
    let mut world = world();
    let stack = &mut world.hosts[1].stack;
    // The first two applications belong to the same user.
    let [app, same, other] = [5, 5, 6].map(|user| {
        let app = stack.add_app(AppMemory::new(16 * MEGABYTE, Arc::default()).unwrap());
        stack.set_user(app, user);
        app
    });
    let mut listeners =
        [app, same, app, same].map(|app| stack.listen(app, None, 7, 256, true).unwrap()).to_vec();
    assert_eq!(stack.listen(other, None, 7, 256, true), Err(CallError::InUse), "it is another user's");
    assert_eq!(stack.listen(app, None, 7, 256, false), Err(CallError::InUse), "it did not ask for it");
    assert_eq!(stack.listen(AppId::OWN, None, 7, 256, true), Err(CallError::InUse), "it is another's");
    stack.listen(AppId::OWN, None, 8, 256, false).unwrap();
    assert_eq!(stack.listen(AppId::OWN, None, 8, 256, true), Err(CallError::InUse), "the other did not");
    world.run(SECOND);
    let spread = |world: &mut World, listeners: &[u32]| {
        world.hosts[1].by_listener.clear();
        let conns = [(); 200].map(|()| connect(world, AppId::OWN, 7));
        let counts = &world.hosts[1].by_listener;
        let even = 200 / listeners.len();
        let fair = |listener: &u32| (even / 2..2 * even).contains(&counts[listener]);
        assert!(counts.len() == listeners.len() && listeners.iter().all(fair), "{counts:?}");
        conns
    };
    let conns = spread(&mut world, &listeners);
    let gone = listeners.remove(1);
    let now = world.now;
    let Host { stack, out, .. } = &mut world.hosts[1];
    stack.unlisten(now, gone, out);
    assert_eq!(stack.listener_info(gone), None);
    spread(&mut world, &listeners);
    // Connections that were accepted from it stay open.
    let now = world.now;
    conns.iter().for_each(|[here, _]| world.hosts[0].send(now, *here, b"still here"));
    world.run(SECOND);
    assert!(conns.iter().all(|[_, there]| world.hosts[1].sessions[there].received == b"still here"));
}

#[test]
fn listener_info_reports_state() {
    let mut world = world();
    let address = Some([10, 0, 0, 2].into());
    let stack = &mut world.hosts[1].stack;
    let chosen = [(); 2].map(|()| stack.listen(AppId::OWN, address, 0, 3, false).unwrap());
    let info = chosen.map(|listener| stack.listener_info(listener).unwrap());
    assert!(info.iter().all(|info| info.address == address && (32768..=60999).contains(&info.port)));
    assert_ne!(info[0].port, info[1].port);
    assert_eq!((info[0].app, info[0].waiting, info[0].backlog), (AppId::OWN, 0, 3));
    let longest = stack.listen(AppId::OWN, address, 0, usize::MAX, false).unwrap();
    assert_eq!(stack.listener_info(longest).unwrap().backlog, 4096);
    let to = std::net::SocketAddr::from(([10, 0, 0, 2], info[0].port));
    let now = world.now;
    world.hosts[0].connect(now, &to.to_string());
    let mut waiting = Vec::new();
    world.run_until(SECOND, |hosts| {
        waiting.push(hosts[1].stack.listener_info(chosen[0]).unwrap().waiting);
        !hosts[1].accepted.is_empty()
    });
    assert_eq!(world.hosts[1].accepted.len(), 1);
    assert_eq!(waiting.last(), Some(&0), "it has been accepted");
}

#[test]
fn connect_uses_bound_address() {
    let mut world = world();
    world.hosts[1].listen(7, 16);
    world.hosts[1].stack.listen(AppId::OWN, None, 8, 16, false).unwrap();
    let now = world.now;
    let mut connect = |from: &str, to: &str| {
        let Host { stack, out, .. } = &mut world.hosts[0];
        let conn = stack.connect(now, AppId::OWN, Some(from.parse().unwrap()), to.parse().unwrap(), out)?;
        Ok(stack.info(conn).unwrap().local.to_string())
    };
    assert_eq!(connect("10.0.0.1:5555", "10.0.0.2:7"), Ok("10.0.0.1:5555".to_owned()));
    assert_eq!(connect("10.0.0.1:5555", "10.0.0.2:7"), Err(CallError::InUse));
    assert_eq!(connect("0.0.0.0:5555", "10.0.0.2:7"), Err(CallError::InUse));
    assert_eq!(connect("0.0.0.0:5555", "10.0.0.2:8"), Ok("10.0.0.1:5555".to_owned()));
    let chosen = connect("10.0.0.1:0", "10.0.0.2:7").unwrap();
    assert!(chosen.starts_with("10.0.0.1:") && !chosen.ends_with(":0") && !chosen.ends_with(":5555"));
    assert_eq!(connect("10.0.0.9:0", "10.0.0.2:7"), Err(CallError::NotOurs));
    assert_eq!(connect("[2001:db8::1]:0", "10.0.0.2:7"), Err(CallError::Tentative));
    world.run(2 * SECOND);
    assert_eq!(world.hosts[1].accepted.len(), 3, "all of them are connected");
    let Host { stack, out, .. } = &mut world.hosts[0];
    let from = Some("[2001:db8::1]:0".parse().unwrap());
    let to = "10.0.0.2:7".parse().unwrap();
    assert_eq!(stack.connect(world.now, AppId::OWN, from, to, out), Err(CallError::NoRoute));
}

/// Returns the memory that an application needs.
fn wanted(stack: &Stack, app: AppId) -> Option<Wanted> {
    stack.wanted_memory().find(|(id, _)| *id == app).map(|(_, wanted)| wanted)
}

/// The mapped memory suffices for new sockets until more is mapped, even if each socket writes as much as it may.
#[test]
fn many_sockets_are_opened_while_memory_grows() {
    let mut stack = Stack::new(Config::default()).unwrap();
    let app = stack.add_app(AppMemory::new(256 * MEGABYTE, Arc::default()).unwrap());
    let mut out = Out::default();
    for now in (0..90).map(Time::from_micros) {
        for _ in 0..16 {
            assert!(stack.open_datagrams(app, None, 0).is_ok(), "at {now:?}");
        }
        stack.timers(now, &mut out);
        if let Some(wanted) = wanted(&stack, app) {
            stack.add_memory(app, Segment::new(wanted).ok());
        }
    }
}

#[test]
fn unneeded_segment_is_returned() {
    let mut stack = Stack::new(Config::default()).unwrap();
    // The last segment of the first application is short. All segments of the second one have full length.
    let short = stack.add_app(AppMemory::new(68 * MEGABYTE, Arc::default()).unwrap());
    let long = stack.add_app(AppMemory::new(256 * MEGABYTE, Arc::default()).unwrap());
    let short_of_memory = |stack: &mut Stack, app| {
        while wanted(stack, app).is_none() {
            stack.open_datagrams(app, None, 0).unwrap();
        }
        wanted(stack, app).unwrap()
    };
    let wanted = [short, long].map(|app| short_of_memory(&mut stack, app));
    let before = stack.counts().memory;
    let [first, second] = wanted.map(|wanted| Segment::new(wanted).unwrap());
    assert!(stack.add_memory(long, Some(first)).is_some());
    let second = stack.add_memory(short, Some(second)).unwrap();
    assert_eq!(stack.counts().memory, before);
    assert!(stack.add_memory(long, Some(second)).is_none());
    assert_eq!(stack.counts().memory, before + (64 << 20));
}

#[test]
fn abort_gone_ends_orphaned_connections() {
    let mut world = world();
    listen(&mut world.hosts[1], AppId::OWN, 7);
    let add = |stack: &mut Stack| stack.add_app(AppMemory::new(4 * MEGABYTE, Arc::default()).unwrap());
    let apps = [(); 2].map(|()| add(&mut world.hosts[0].stack));
    let mut memory = Vec::new();
    for app in apps {
        let [here, there] = connect(&mut world, app, 7);
        // The peer reads nothing, so that unsent data remains.
        set_appetite(&mut world.hosts[1], there, 0);
        let now = world.now;
        world.hosts[0].send(now, here, &content(1, 1_000_000));
        world.run(SECOND);
        let Host { stack, out, .. } = &mut world.hosts[0];
        memory.push(Arc::clone(stack.memory(app)));
        // The application still exists, so nothing is aborted.
        stack.abort_removed(world.now, memory.last().unwrap(), out);
        stack.close(world.now, here, out);
        stack.remove_app(app);
    }
    let Host { stack, out, .. } = &mut world.hosts[0];
    let before = stack.counts().memory;
    stack.abort_removed(world.now, &memory[0], out);
    world.run(3 * SECOND);
    let after = world.hosts[0].stack.counts().memory;
    assert_eq!(after, before - (4 << 20), "one was ended, and the other one still sends");
}

#[test]
fn abort_removed_is_bounded() {
    let mut world = world();
    listen(&mut world.hosts[1], AppId::OWN, 7);
    let [gone, other] = [(); 2]
        .map(|()| world.hosts[0].stack.add_app(AppMemory::new(64 * MEGABYTE, Arc::default()).unwrap()));
    let conns: Vec<ConnId> = (0..310).map(|_| connect(&mut world, gone, 7)[0]).collect();
    let kept = connect(&mut world, other, 7)[0];
    let now = world.now;
    let Host { stack, out, .. } = &mut world.hosts[0];
    conns.iter().step_by(31).for_each(|conn| stack.abort(now, *conn, out));
    world.run(3 * SECOND);
    let memory = Arc::clone(world.hosts[0].stack.memory(gone));
    world.hosts[0].stack.remove_app(gone);
    for left in [300, 300 - 256, 0] {
        let of_gone = |conn: &&ConnId| world.hosts[0].stack.info(**conn).is_some();
        assert_eq!(conns.iter().filter(of_gone).count(), left);
        let now = world.now;
        let Host { stack, out, .. } = &mut world.hosts[0];
        stack.abort_removed(now, &memory, out);
        world.run(3 * SECOND);
    }
    assert!(world.hosts[0].stack.info(kept).is_some());
}
