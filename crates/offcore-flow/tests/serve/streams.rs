//! Streams: what `poll` shows in each state, and that bytes arrive.

use rustix::event::PollFlags as Bits;

use crate::process::Process;
use crate::world;

const IN: Bits = Bits::IN;
const OUT: Bits = Bits::OUT;

#[test]
fn connections_are_accepted_and_echoed() {
    let (mut world, path) = crate::world();
    let process = Process::attach(&mut world, &path);
    let listener = process.listen(&mut world, 80, 16);
    assert_eq!(listener.bits(), Bits::empty());
    let mut peer = world.connect(80);
    world.run(0.1);
    assert_eq!(listener.bits(), IN);
    let mut end = process.accept(&listener).unwrap();
    assert_eq!((listener.bits(), end.bits()), (Bits::empty(), OUT));
    world.write(&mut peer, b"hello");
    world.run(0.1);
    assert_eq!(end.bits(), IN | OUT);
    assert_eq!(process.read(&mut end, 100), b"hello");
    assert_eq!(end.bits(), OUT);
    assert_eq!(process.write(&mut end, b"good day"), 8);
    world.run(0.1);
    assert_eq!(world.read(&mut peer, 100), b"good day");
    drop(end);
    world.run(0.1);
    assert!(world.has_ended(&peer));
}
