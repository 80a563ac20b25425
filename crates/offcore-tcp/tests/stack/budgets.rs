//! Applications of one user, which share its budget of memory and its share of connections.

use std::sync::Arc;

use offcore_session::{Budget, Charge};
use offcore_stats::time::Micros;
use offcore_tcp::proto::{AppId, AppMemory, CallError, Config, ConnId, DropReason, Stack};

use crate::host::Host;
use crate::streams::content;
use crate::world::World;

const SECOND: Micros = Micros::from_secs(1);
const MEGABYTE: usize = 1 << 20;

/// Creates hosts that know each other's MAC address.
fn world() -> World {
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[0].connect(world.now, "10.0.0.2:9");
    world.run(SECOND);
    world
}

fn add_app(stack: &mut Stack, budget: &Arc<Budget>) -> AppId {
    let charge = Arc::new(Charge::new(Arc::clone(budget)));
    stack.add_app(AppMemory::new(64 * MEGABYTE, charge).unwrap())
}

/// Opens as many connections of an application of host 1 as its budget pays for.
fn open_all(world: &mut World, app: AppId) -> Vec<ConnId> {
    let Host { stack, out, .. } = &mut world.hosts[1];
    let mut conns = Vec::new();
    loop {
        match stack.connect(world.now, app, None, "10.0.0.1:9".parse().unwrap(), out) {
            Ok(conn) => conns.push(conn),
            Err(error) => {
                assert_eq!(error, CallError::TooMany);
                return conns;
            }
        }
    }
}

/// Removes an application of host 1 and its connections. Its part of the budget is free afterwards.
fn end(world: &mut World, app: AppId, conns: &[ConnId]) {
    let Host { stack, out, .. } = &mut world.hosts[1];
    conns.iter().for_each(|conn| stack.abort(world.now, *conn, out));
    stack.remove_app(app);
}

#[test]
fn budget_limits_connections() {
    let mut world = world();
    let [budget, other] = [(); 2].map(|()| Arc::new(Budget::new(4 * MEGABYTE)));
    let apps = [(); 2].map(|()| add_app(&mut world.hosts[1].stack, &budget));
    let stranger = add_app(&mut world.hosts[1].stack, &other);
    let first = open_all(&mut world, apps[0]);
    // Each connection needs 4 KiB of private memory, and its slot.
    assert!((400..600).contains(&first.len()), "{}", first.len());
    assert_eq!(open_all(&mut world, apps[1]), [], "another application of the user does not add to it");
    let listen = world.hosts[1].stack.listen(apps[1], None, 7, 64, false);
    assert_eq!(listen, Err(CallError::TooMany));
    assert!(!open_all(&mut world, stranger).is_empty());
    end(&mut world, apps[0], &first);
    assert!(open_all(&mut world, apps[1]).len() > 400);
}

#[test]
fn handshake_waits_for_budget() {
    let mut world = world();
    let budget = Arc::new(Budget::new(4 * MEGABYTE));
    let [server, greedy] = [(); 2].map(|()| add_app(&mut world.hosts[1].stack, &budget));
    world.hosts[1].stack.listen(server, None, 7, 64, false).unwrap();
    let greeds = open_all(&mut world, greedy);
    let now = world.now;
    let conns = [(); 64].map(|()| world.hosts[0].connect(now, "10.0.0.2:7"));
    world.run(SECOND);
    let accepted = world.hosts[1].accepted.len();
    assert!(accepted < 16, "the charge of the listener pays for {accepted}");
    assert!(world.hosts[1].stack.drops().get(DropReason::NoSpace) > 0);
    end(&mut world, greedy, &greeds);
    assert!(world.run_until(60 * SECOND, |hosts| hosts[1].accepted.len() == conns.len()));
}

#[test]
fn users_share_connections() {
    let mut world = World::new(1, 1500, Config { connections: 64, ..Config::default() });
    let stack = &mut world.hosts[1].stack;
    let [one, same, other] = [1, 1, 2].map(|user| {
        let app = stack.add_app(AppMemory::new(4 * MEGABYTE, Arc::default()).unwrap());
        stack.set_user(app, user);
        app
    });
    let conns = open_all(&mut world, one);
    assert_eq!((conns.len(), open_all(&mut world, same).len()), (64, 0));
    assert_eq!(open_all(&mut world, other).len(), 32);
    end(&mut world, one, &conns);
    assert_eq!(open_all(&mut world, same).len(), 32);
}

/// A window promises memory that is not charged yet. Segments without memory are dropped and retransmitted.
#[test]
fn promised_window_survives_full_budget() {
    const LEN: usize = 200_000;
    let mut world = world();
    let budget = Arc::new(Budget::new(4 * MEGABYTE));
    let [server, greedy] = [(); 2].map(|()| add_app(&mut world.hosts[1].stack, &budget));
    world.hosts[1].stack.listen(server, None, 7, 64, false).unwrap();
    let now = world.now;
    let conns = [(); 8].map(|()| world.hosts[0].connect(now, "10.0.0.2:7"));
    assert!(world.run_until(SECOND, |hosts| hosts[1].accepted.len() == conns.len()));
    let accepted = world.hosts[1].accepted.clone();
    accepted.iter().for_each(|conn| world.hosts[1].sessions.get_mut(conn).unwrap().appetite = 0);
    open_all(&mut world, greedy);
    let now = world.now;
    conns.iter().for_each(|conn| world.hosts[0].send(now, *conn, &content(1, LEN)));
    world.run(5 * SECOND);
    assert!(world.hosts[1].stack.drops().get(DropReason::NoSpace) > 0, "the windows were open");
    let now = world.now;
    for conn in &accepted {
        world.hosts[1].sessions.get_mut(conn).unwrap().appetite = usize::MAX;
        world.hosts[1].read(now, *conn);
    }
    let all =
        |hosts: &mut [Host; 2]| accepted.iter().all(|conn| hosts[1].sessions[conn].received.len() == LEN);
    assert!(world.run_until(600 * SECOND, all), "although the other application keeps its memory");
    assert!(accepted.iter().all(|conn| world.hosts[1].sessions[conn].received == content(1, LEN)));
}
