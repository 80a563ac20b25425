use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;

fn submitted(bursts: &[(u64, usize)]) -> Vec<SubmittedBurst> {
    bursts.iter().map(|&(turn, packets)| SubmittedBurst { turn, packets }).collect()
}

#[test]
fn batch_takes_consecutive_turns() {
    assert_eq!(next_batch(&[]), None);
    let one = next_batch(&submitted(&[(7, 0)]));
    assert_eq!(one, Some(LaunchBatch { turn: 7, bursts: 1, packets: 0 }), "a single burst does not wait");
    let three = next_batch(&submitted(&[(7, 3), (8, 900), (9, 64)]));
    assert_eq!(three, Some(LaunchBatch { turn: 7, bursts: 3, packets: 900 }));
    let gap = next_batch(&submitted(&[(7, 3), (8, 4), (10, 900)]));
    assert_eq!(gap, Some(LaunchBatch { turn: 7, bursts: 2, packets: 4 }));
}

#[test]
fn batch_has_16_bursts_at_most() {
    let many: Vec<_> = (0..40).map(|turn| (turn, turn as usize)).collect();
    for (there, taken) in [(15, 15), (16, 16), (17, 16), (40, 16)] {
        let bursts = next_batch(&submitted(&many[..there])).unwrap();
        assert_eq!(bursts, LaunchBatch { turn: 0, bursts: taken, packets: taken as usize - 1 });
    }
}

/// Reports each launch, then blocks until it is released.
#[derive(Debug)]
struct Reporter {
    said: Sender<LaunchBatch>,
    go_on: Receiver<()>,
    /// Turns that are answered.
    answered: Arc<AtomicU64>,
}

impl BatchLauncher for Reporter {
    fn launch(&mut self, bursts: LaunchBatch) {
        self.said.send(bursts).unwrap();
        self.go_on.recv().unwrap();
    }

    fn is_answered(&self, turn: u64) -> bool {
        turn < self.answered.load(Ordering::Relaxed)
    }
}

/// Returns an opened queue, the receiver of its launches, and the sender that releases them.
fn opened(thread: &Arc<LaunchThread>, slots: u32) -> (BurstQueue, Receiver<LaunchBatch>, Sender<()>) {
    let ((said, hears), (lets, go_on)) = (channel(), channel());
    let mut queue = thread.queue(slots).unwrap();
    queue.open(Box::new(Reporter { said, go_on, answered: Arc::new(u64::MAX.into()) }));
    (queue, hears, lets)
}

fn next(hears: &Receiver<LaunchBatch>) -> LaunchBatch {
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
fn bursts_during_a_launch_go_in_the_next() {
    let thread = Arc::new(LaunchThread::start().unwrap());
    let (mut queue, hears, lets) = opened(&thread, 64);
    queue.push(0, 5);
    assert_eq!(next(&hears), LaunchBatch { turn: 0, bursts: 1, packets: 5 });
    (1..=20).for_each(|turn| queue.push(turn, turn as usize));
    assert!(!queue.is_empty());
    (0..3).for_each(|_| lets.send(()).unwrap());
    assert_eq!(next(&hears), LaunchBatch { turn: 1, bursts: 16, packets: 16 });
    assert_eq!(next(&hears), LaunchBatch { turn: 17, bursts: 4, packets: 20 });
    wait_for_all(&mut queue);
}

#[test]
fn bursts_behind_two_launches_share_the_next() {
    let thread = Arc::new(LaunchThread::start().unwrap());
    let ((said, hears), (lets, go_on), answered) = (channel(), channel(), Arc::new(AtomicU64::new(0)));
    let mut queue = thread.queue(64).unwrap();
    queue.open(Box::new(Reporter { said, go_on, answered: Arc::clone(&answered) }));
    (0..5).for_each(|_| lets.send(()).unwrap());
    for turn in 0..2 {
        queue.push(turn, 1);
        assert_eq!(next(&hears), LaunchBatch { turn, bursts: 1, packets: 1 });
    }
    (2..5).for_each(|turn| queue.push(turn, 1));
    let early = hears.recv_timeout(Duration::from_millis(20));
    assert!(early.is_err(), "two launches are unfinished: {early:?}");
    answered.store(1, Ordering::Relaxed);
    assert_eq!(next(&hears), LaunchBatch { turn: 2, bursts: 3, packets: 1 });
    // A full batch does not wait.
    (5..21).for_each(|turn| queue.push(turn, 1));
    assert_eq!(next(&hears), LaunchBatch { turn: 5, bursts: 16, packets: 1 });
    wait_for_all(&mut queue);
}

fn wait_for_all(queue: &mut BurstQueue) {
    let since = Instant::now();
    while !queue.is_empty() {
        assert!(since.elapsed() < Duration::from_secs(10), "no progress for 10 s");
    }
}

/// A ring's worth of bursts may be in flight while the launch of a ring's worth has not returned.
#[test]
fn small_queue_holds_all_bursts_in_flight() {
    let thread = Arc::new(LaunchThread::start().unwrap());
    let (mut queue, hears, lets) = opened(&thread, 2);
    queue.push(0, 1);
    assert_eq!(next(&hears).bursts, 1);
    (1..=3).for_each(|turn| queue.push(turn, 1));
    (0..3).for_each(|_| lets.send(()).unwrap());
    assert_eq!(next(&hears), LaunchBatch { turn: 1, bursts: 2, packets: 1 });
    assert_eq!(next(&hears), LaunchBatch { turn: 3, bursts: 1, packets: 1 });
}

#[test]
fn one_thread_serves_changing_queues() {
    let place = Mutex::default();
    let thread = LaunchThread::shared_at(&place).unwrap();
    let seen = Arc::downgrade(&thread);
    let mailbox = Arc::clone(&thread.mailbox);
    let mut queues: Vec<_> = (0..5).map(|_| opened(&thread, 4)).collect();
    drop(thread);
    assert!(Arc::ptr_eq(&LaunchThread::shared_at(&place).unwrap(), &queues[0].0.thread));
    for turn in 0..3 {
        for (queue, hears, lets) in &mut queues {
            queue.push(turn, 1);
            lets.send(()).unwrap();
            assert_eq!(next(hears), LaunchBatch { turn, bursts: 1, packets: 1 });
        }
        let (queue, hears, _lets) = queues.pop().unwrap();
        drop(queue);
        assert!(hears.recv().is_err(), "the launcher is dropped with its queue");
        assert!(!mailbox.has_ended());
    }
    queues.clear();
    assert!(seen.upgrade().is_none() && mailbox.has_ended(), "the thread ends with the last queue");
    assert!(
        !LaunchThread::shared_at(&place).unwrap().mailbox.has_ended(),
        "another begins with the next one"
    );
}

#[test]
fn thread_that_panicked_is_replaced() {
    let place = Mutex::default();
    let thread = LaunchThread::shared_at(&place).unwrap();
    let (mut panics, hears, lets) = opened(&thread, 4);
    let (mut other, other_hears, _lets) = opened(&thread, 4);
    panics.push(0, 1);
    assert_eq!(next(&hears).bursts, 1);
    // Its launch panics.
    drop(lets);
    let mailbox = panics.mailbox();
    wait_for(|| mailbox.has_ended());
    other.push(0, 1);
    assert!(!other.is_empty());
    assert!(other_hears.recv().is_err(), "nothing is launched any more");
    let (late, late_hears, _lets) = opened(&thread, 4);
    drop(late);
    assert!(late_hears.recv().is_err(), "a queue that it never took over is dropped, too");
    assert!(!LaunchThread::shared_at(&place).unwrap().mailbox.has_ended());
}
