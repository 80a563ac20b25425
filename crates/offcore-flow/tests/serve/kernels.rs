//! Tests of kernel listeners that belong to sessions.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use offcore_flow::host::serve::Serve;
use offcore_session::message::{Accepted, SessionId};
use offcore_stats::time::Time;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;

use crate::process::{Process, listen, receive};
use crate::setup::{world, world_of_many_users};
use crate::world::World;

#[test]
fn kernel_connections_share_accept_queue() {
    let (mut world, path) = world();
    let process = Process::attach(&mut world, &path);
    let kernel = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = kernel.local_addr().unwrap();
    let (answer, mut descriptors) = process.ask(&mut world, &listen(80, 16), &[kernel.as_fd()]);
    assert_eq!(answer.error, 0);
    let listener = process.end(answer.session, descriptors.pop().unwrap());
    let mut ours: Vec<_> = (0..30).map(|_| TcpStream::connect(to).unwrap()).collect();
    let other = world.connect(80);
    world.run(0.1);
    let (mut kernels, mut stacks) = (Vec::new(), 0);
    while kernels.len() + stacks < 31 {
        let mut bytes = [0; Accepted::LEN];
        match receive(listener.fd.as_fd(), &mut bytes) {
            Ok((_, mut descriptors)) => {
                let Accepted { session } = Accepted::from_bytes(&bytes).unwrap();
                let fd = descriptors.pop().unwrap();
                if session == SessionId::default() {
                    kernels.push(TcpStream::from(fd));
                } else {
                    stacks += 1;
                }
            }
            // A thread accepts the kernel's connections in real time, not in the virtual time of the world.
            Err(_) => {
                world.turn();
                sleep(Duration::from_millis(2));
            }
        }
        assert!(world.now < Time::from_secs(60), "{} and {stacks}", kernels.len());
    }
    assert_eq!((kernels.len(), stacks), (30, 1));
    ours[7].write_all(b"hello").unwrap();
    let from = ours[7].local_addr().unwrap();
    let there = kernels.iter_mut().find(|stream| stream.peer_addr().unwrap() == from).unwrap();
    let mut bytes = [0; 5];
    there.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
    drop((listener, kernel));
    let start = Instant::now();
    while TcpStream::connect(to).is_ok() {
        assert!(start.elapsed() < Duration::from_secs(30), "the stack has not let go of it");
        world.run(0.1);
    }
    let _ = other;
}

#[test]
fn kernel_listener_outlives_session() {
    let (mut world, path) = world();
    let process = Process::attach(&mut world, &path);
    let kernel = TcpListener::bind("127.0.0.1:0").unwrap();
    let (answer, descriptors) = process.ask(&mut world, &listen(80, 16), &[kernel.as_fd()]);
    assert_eq!(answer.error, 0);
    drop(descriptors);
    world.run(5.0);
    assert_eq!(world.app.counts().sessions, 0);
    let to = kernel.local_addr().unwrap();
    let ours = TcpStream::connect(to).unwrap();
    let theirs = kernel.accept().unwrap().1;
    assert_eq!(theirs, ours.local_addr().unwrap());
}

/// Sets a flag on drop, so that the threads of a failed test end.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Makes `accept` on `kernel` block: steals its connections, and clears its non-blocking flag. Each new connection
/// waits until the stack has made progress since the previous one.
fn hostile(kernel: &TcpListener, beats: &AtomicU64, connected: &AtomicU64, stop: &AtomicBool) {
    let stopped = || stop.load(Ordering::Relaxed);
    let to = kernel.local_addr().unwrap();
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stopped() {
                    fcntl_setfl(kernel, OFlags::empty()).unwrap();
                }
            });
        }
        let thief = scope.spawn(|| {
            while !stopped() {
                let mut events = [PollFd::new(kernel, PollFlags::IN)];
                let timeout = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
                if poll(&mut events, Some(&timeout)) == Ok(1) {
                    drop(kernel.accept());
                }
            }
        });
        let mut last = u64::MAX;
        while !stopped() {
            let now = beats.load(Ordering::Relaxed);
            if now != last {
                last = now;
                connected.fetch_add(1, Ordering::Relaxed);
                drop(TcpStream::connect(to));
            }
            thread::yield_now();
        }
        while !thief.is_finished() {
            drop(TcpStream::connect(to));
            sleep(Duration::from_millis(1));
        }
    });
}

#[test]
fn blocking_listener_stalls_no_application() {
    let (mut world, path) = world();
    let good = Process::attach(&mut world, &path);
    let listener = good.listen(&mut world, 80, 16);
    let mut client = world.connect(80);
    world.run(0.1);
    let mut end = good.accept(&listener).unwrap();
    let bad = Process::attach(&mut world, &path);
    let kernel = TcpListener::bind("127.0.0.1:0").unwrap();
    let (answer, queue) = bad.ask(&mut world, &listen(81, 16), &[kernel.as_fd()]);
    assert_eq!(answer.error, 0);
    let (beats, connected, stop, hung) =
        (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| hostile(&kernel, &beats, &connected, &stop));
        scope.spawn(|| {
            let (mut last, mut since) = (u64::MAX, Instant::now());
            while !stop.load(Ordering::Relaxed) {
                let now = beats.load(Ordering::Relaxed);
                if now != last {
                    (last, since) = (now, Instant::now());
                } else if since.elapsed() > Duration::from_secs(10) {
                    hung.store(true, Ordering::Relaxed);
                    // This connection ends the blocking call of the stack.
                    drop(TcpStream::connect(kernel.local_addr().unwrap()));
                }
                sleep(Duration::from_millis(10));
            }
        });
        let begun = Instant::now();
        while connected.load(Ordering::Relaxed) < 1000 && !hung.load(Ordering::Relaxed) {
            assert_eq!(world.write(&mut client, b"ping"), 4);
            let there = world.run_until(60, |_| end.reader.available() >= 4);
            assert!(there.is_some());
            assert_eq!(good.read(&mut end, 100), b"ping");
            // A full queue would stop the stack from accepting.
            while receive(queue[0].as_fd(), &mut [0; Accepted::LEN]).is_ok() {}
            beats.fetch_add(1, Ordering::Relaxed);
            assert!(begun.elapsed() < Duration::from_secs(300));
        }
    });
    assert!(!hung.load(Ordering::Relaxed), "the worker waits for a connection");
}

/// The charge for a kernel listener includes the descriptors that its connections may occupy in the stack.
#[test]
fn kernel_listener_charges_connections() {
    let (mut world, path) = world_of_many_users();
    let process = Process::attach(&mut world, &path);
    let too_many = Errno::MFILE.raw_os_error() as u32;
    let all = |world: &mut World<Serve>, kernel: Option<&TcpListener>| {
        let mut listeners = Vec::new();
        loop {
            let kernel: Vec<_> = kernel.iter().map(|kernel| kernel.as_fd()).collect();
            let (answer, descriptors) = process.ask(world, &listen(80 + listeners.len() as u16, 1), &kernel);
            if answer.error != 0 {
                assert_eq!(answer.error, too_many);
                return listeners;
            }
            listeners.push(descriptors);
        }
    };
    let kernel = TcpListener::bind("127.0.0.1:0").unwrap();
    let mixed = all(&mut world, Some(&kernel));
    world.run(0.01);
    assert_eq!(world.app.counts().sessions, mixed.len() as u64, "a failed call leaves no session");
    let few = mixed.len();
    drop(mixed);
    process.look();
    // A thread closes the listeners, which ends their charge.
    let start = Instant::now();
    let mut plain = 0;
    while plain < 10 * few {
        assert!(start.elapsed() < Duration::from_secs(30), "{plain} and {few} with kernel listeners");
        world.run(0.01);
        plain = all(&mut world, None).len();
        process.look();
    }
}
