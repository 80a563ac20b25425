use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;

fn submitted(bursts: &[(u64, usize)]) -> Vec<Submitted> {
    bursts.iter().map(|&(turn, packets)| Submitted { turn, packets }).collect()
}

#[test]
fn bursts_of_consecutive_turns_go_together_and_the_longest_says_how_many_blocks() {
    assert_eq!(together(&[]), None);
    let one = together(&submitted(&[(7, 0)]));
    assert_eq!(one, Some(Together { turn: 7, bursts: 1, packets: 0 }), "one alone does not wait for others");
    let three = together(&submitted(&[(7, 3), (8, 900), (9, 64)]));
    assert_eq!(three, Some(Together { turn: 7, bursts: 3, packets: 900 }));
    let gap = together(&submitted(&[(7, 3), (8, 4), (10, 900)]));
    assert_eq!(gap, Some(Together { turn: 7, bursts: 2, packets: 4 }));
}

#[test]
fn no_more_than_16_bursts_go_together() {
    let many: Vec<_> = (0..40).map(|turn| (turn, turn as usize)).collect();
    for (there, taken) in [(15, 15), (16, 16), (17, 16), (40, 16)] {
        let bursts = together(&submitted(&many[..there])).unwrap();
        assert_eq!(bursts, Together { turn: 0, bursts: taken, packets: taken as usize - 1 });
    }
}

/// Says what it is to launch, and is as slow as whoever lets it go on.
#[derive(Debug)]
struct Told {
    said: Sender<Together>,
    go_on: Receiver<()>,
}

impl Launches for Told {
    fn launch(&mut self, bursts: Together) {
        self.said.send(bursts).unwrap();
        self.go_on.recv().unwrap();
    }
}

/// A queue, what is said of its launches, and what lets them go on.
fn told(thread: &Arc<LaunchThread>, slots: u32) -> (Queue, Receiver<Together>, Sender<()>) {
    let ((said, hears), (lets, go_on)) = (channel(), channel());
    let mut queue = thread.queue(slots).unwrap();
    queue.open(Box::new(Told { said, go_on }));
    (queue, hears, lets)
}

fn next(hears: &Receiver<Together>) -> Together {
    hears.recv_timeout(Duration::from_secs(10)).expect("no progress for 10 s")
}

fn wait_for(what: impl Fn() -> bool) {
    let since = Instant::now();
    while !what() {
        assert!(since.elapsed() < Duration::from_secs(10), "no progress for 10 s");
        thread::yield_now();
    }
}

#[test]
fn what_comes_while_a_launch_is_under_way_goes_in_the_next_ones() {
    let thread = Arc::new(LaunchThread::start().unwrap());
    let (mut queue, hears, lets) = told(&thread, 64);
    queue.push(0, 5);
    assert_eq!(next(&hears), Together { turn: 0, bursts: 1, packets: 5 });
    (1..=20).for_each(|turn| queue.push(turn, turn as usize));
    assert!(!queue.is_empty());
    (0..3).for_each(|_| lets.send(()).unwrap());
    assert_eq!(next(&hears), Together { turn: 1, bursts: 16, packets: 16 });
    assert_eq!(next(&hears), Together { turn: 17, bursts: 4, packets: 20 });
    let since = Instant::now();
    while !queue.is_empty() {
        assert!(since.elapsed() < Duration::from_secs(10), "no progress for 10 s");
    }
}

/// As many as there are slots may be on their way while the launch of as many others is not over.
#[test]
fn a_queue_of_a_small_ring_takes_all_that_are_on_their_way() {
    let thread = Arc::new(LaunchThread::start().unwrap());
    let (mut queue, hears, lets) = told(&thread, 2);
    queue.push(0, 1);
    assert_eq!(next(&hears).bursts, 1);
    (1..=3).for_each(|turn| queue.push(turn, 1));
    (0..3).for_each(|_| lets.send(()).unwrap());
    assert_eq!(next(&hears), Together { turn: 1, bursts: 2, packets: 1 });
    assert_eq!(next(&hears), Together { turn: 3, bursts: 1, packets: 1 });
}

#[test]
fn one_thread_serves_queues_that_come_and_go() {
    let place = Mutex::default();
    let thread = LaunchThread::shared_at(&place).unwrap();
    let seen = Arc::downgrade(&thread);
    let desk = Arc::clone(&thread.desk);
    let mut queues: Vec<_> = (0..5).map(|_| told(&thread, 4)).collect();
    drop(thread);
    assert!(Arc::ptr_eq(&LaunchThread::shared_at(&place).unwrap(), &queues[0].0.thread));
    for turn in 0..3 {
        for (queue, hears, lets) in &mut queues {
            queue.push(turn, 1);
            lets.send(()).unwrap();
            assert_eq!(next(hears), Together { turn, bursts: 1, packets: 1 });
        }
        let (queue, hears, _lets) = queues.pop().unwrap();
        drop(queue);
        assert!(hears.recv().is_err(), "who launched has been dropped with its queue");
        assert!(!desk.is_gone());
    }
    queues.clear();
    assert!(seen.upgrade().is_none() && desk.is_gone(), "the thread ends with the last queue");
    assert!(!LaunchThread::shared_at(&place).unwrap().desk.is_gone(), "another begins with the next one");
}

#[test]
fn a_thread_that_has_panicked_is_gone_and_is_not_taken_again() {
    let place = Mutex::default();
    let thread = LaunchThread::shared_at(&place).unwrap();
    let (mut panics, hears, lets) = told(&thread, 4);
    let (mut other, other_hears, _lets) = told(&thread, 4);
    panics.push(0, 1);
    assert_eq!(next(&hears).bursts, 1);
    // It is let go on by nobody.
    drop(lets);
    let desk = panics.desk();
    wait_for(|| desk.is_gone());
    other.push(0, 1);
    assert!(!other.is_empty());
    assert!(other_hears.recv().is_err(), "nothing is launched any more");
    let (late, late_hears, _lets) = told(&thread, 4);
    drop(late);
    assert!(late_hears.recv().is_err(), "what it has never seen is dropped, too");
    assert!(!LaunchThread::shared_at(&place).unwrap().desk.is_gone());
}
