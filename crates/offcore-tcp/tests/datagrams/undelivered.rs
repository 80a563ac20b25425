//! Error queues of datagram sockets (`IP_RECVERR`).

use offcore_session::undelivered::Origin;
use offcore_tcp::proto::Event;

use crate::one_peer::{NOBODY, altered, refused};
use crate::world::{World, addresses};

const EMSGSIZE: u32 = 90;
const ECONNREFUSED: u32 = 111;
const EHOSTUNREACH: u32 = 113;

fn enable_recverr(world: &mut World, v4: bool, v6: bool) {
    let end = &mut world.ends[0];
    end.path.call().0.set_recverr(end.socket, v4, v6);
}

fn events(world: &mut World) -> Vec<u16> {
    let failed = |event| if let Event::Failed(_, errno) = event { Some(errno) } else { None };
    world.ends[0].events.drain(..).filter_map(failed).collect()
}

#[test]
fn icmp_errors_enter_error_queue() {
    for (at, (to, v6)) in addresses(2).into_iter().zip([false, true]).enumerate() {
        let mut world = World::new(false);
        let socket = world.ends[0].socket;
        refused(&mut world, to);
        assert_eq!(events(&mut world), [], "neither connected nor asked for");
        enable_recverr(&mut world, v6, !v6);
        refused(&mut world, to);
        assert_eq!(events(&mut world), [], "the other family");
        enable_recverr(&mut world, !v6, v6);
        for _ in 0..2 {
            refused(&mut world, to);
        }
        assert_eq!(events(&mut world), [ECONNREFUSED as u16; 2]);
        let stack = world.ends[0].path.call().0;
        let (error, next) = stack.take_undelivered(socket).unwrap();
        assert_eq!((error.error, next), (ECONNREFUSED, Some(ECONNREFUSED)));
        assert_eq!((error.to, error.offender), ((to, NOBODY).into(), Some(to)));
        let icmp = [(Origin::Icmp, 3, 3), (Origin::Icmp6, 1, 4)];
        assert_eq!((error.origin, error.kind, error.code), icmp[at]);
        assert_eq!((error.payload(), error.info), (&b"anybody?"[..], 0));
        assert_eq!(stack.take_undelivered(socket).unwrap().1, None);
        assert_eq!(stack.take_undelivered(socket), None);
    }
}

/// traceroute learns the addresses of routers in this way.
#[test]
fn time_exceeded_names_router() {
    let to = addresses(2)[0];
    let mut world = World::new(false);
    let error = refused(&mut world, to).remove(0);
    enable_recverr(&mut world, true, true);
    // Type 11 is Time Exceeded: the TTL has reached 0.
    let mut expired = error;
    (expired[34], expired[35]) = (11, 0);
    let expired = altered(&altered(&expired, 41), 41);
    let (socket, now) = (world.ends[0].socket, world.now);
    world.ends[0].receive(now, &expired);
    world.run(|_, frame| vec![frame]);
    assert_eq!(events(&mut world), [EHOSTUNREACH as u16]);
    let (error, _) = world.ends[0].path.call().0.take_undelivered(socket).unwrap();
    assert_eq!((error.error, error.kind, error.code, error.offender), (EHOSTUNREACH, 11, 0, Some(to)));
}

#[test]
fn error_queue_is_bounded() {
    let to = addresses(2)[0];
    let mut world = World::new(false);
    let error = refused(&mut world, to).remove(0);
    enable_recverr(&mut world, true, false);
    let (socket, now) = (world.ends[0].socket, world.now);
    for _ in 0..1000 {
        world.ends[0].receive(now, &error);
    }
    let stack = world.ends[0].path.call().0;
    stack.datagram_too_long_to_send(socket, (to, NOBODY).into(), 1500);
    let mut count = 0;
    while let Some((error, _)) = stack.take_undelivered(socket) {
        count += 1;
        assert_eq!(error.error, ECONNREFUSED, "the newest ones are dropped");
    }
    assert_eq!(count, 64);
    stack.datagram_too_long_to_send(socket, (to, NOBODY).into(), 1500);
    let (error, _) = stack.take_undelivered(socket).unwrap();
    assert_eq!((error.error, error.origin, error.info), (EMSGSIZE, Origin::Local, 1500));
    stack.datagram_too_long_to_send(socket, (to, NOBODY).into(), 1500);
    stack.set_recverr(socket, false, false);
    assert_eq!(stack.take_undelivered(socket), None, "the option was cleared");
}
