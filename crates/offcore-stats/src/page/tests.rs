use std::sync::atomic::AtomicBool;
use std::sync::mpsc::sync_channel;

use proptest::prelude::*;

use super::*;
use crate::counters;
use crate::family::{self, Description};

counters! {
    /// Counters of a test.
    struct TestCounts, enum TestCount {
        /// Packets that arrived,
        /// in two lines.
        Packets = packets: Packets,
        /// Bytes in use.
        Used = used: Bytes gauge,
    }
}

counters! {
    /// Counters in a block of several lines.
    struct ManyCounts {
        /// One.
        a: Events,
        /// Two.
        b: Events,
        /// Three.
        c: Events,
    }
}

static TEST: Family = Family::new("test", "Counters of a test.", &[&TestCounts::COUNTERS]);
static MANY: Family = Family::new("many", "Many counters.", &[&MANY_COUNTERS]);
/// A smaller family with the name of [`TEST`].
static OLDER: Family = Family::new("test", "Counters of an older version.", &[&OLDER_COUNTERS]);
const OLDER_COUNTERS: [Description; 1] = [TestCounts::COUNTERS[TestCount::Used as usize]];
const MANY_COUNTERS: [Description; 12] = {
    let [a, b, c] = ManyCounts::COUNTERS;
    [a, b, c, a, b, c, a, b, c, a, b, c]
};

fn page(len: usize) -> (StatsPage, Reader) {
    let page = StatsPage::new(len).unwrap();
    let reader = Reader::open(page.fd()).unwrap();
    (page, reader)
}

#[test]
fn reader_sees_worker_counters() {
    let (page, reader) = page(1 << 14);
    let labels = |block: &Snapshot| [Label::Port, Label::Queue].map(|key| block.label(key).map(String::from));
    let a = page.block(&TEST, &[(Label::Port, &"port0"), (Label::Queue, &3)]).unwrap();
    let b = page.block(&TEST, &[(Label::Port, &"a=b\n")]).unwrap();
    a.counter(TestCount::Used as usize).set(7);
    b.counter(TestCount::Packets as usize).add(3);
    TestCounts { packets: 1, used: 2 }.add_to(&b);
    let seen = reader.read().unwrap();
    assert_eq!(
        seen.iter().map(TestCounts::decode).map(TestCounts::values).collect::<Vec<_>>(),
        [[0, 7], [4, 2]]
    );
    assert_eq!(labels(&seen[0]), [Some("port0".into()), Some("3".into())]);
    assert_eq!(labels(&seen[1]), [Some("a=b?".into()), None]);
}

#[test]
fn page_describes_its_families() {
    let (page, reader) = page(1 << 14);
    let blocks =
        [page.block(&TEST, &[]), page.block(&TEST, &[]), page.block(&OLDER, &[])].map(Result::unwrap);
    blocks[2].counter(0).set(5);
    let seen = reader.read().unwrap();
    let Schema { name, help, columns } = &*seen[0].schema;
    assert_eq!((name.as_str(), help.as_str(), columns.len()), ("test", "Counters of a test.", 2));
    let Column { name, unit, kind, help } = &columns[0];
    assert_eq!((name.as_str(), unit.as_str(), *kind), ("packets", "packets", family::Kind::Counter));
    assert_eq!(help, "Packets that arrived, in two lines.");
    assert_eq!((columns[1].unit.as_str(), columns[1].kind), ("bytes", family::Kind::Gauge));
    assert!(Arc::ptr_eq(&seen[0].schema, &seen[1].schema));
    // A page of an older version lacks a counter.
    assert!(seen[2].is_of(&TEST));
    assert_eq!(TestCounts::decode(&seen[2]), TestCounts { packets: 0, used: 5 });
}

#[test]
fn readers_can_only_read() {
    let page = StatsPage::new(4096).unwrap();
    assert_eq!(rustix::fs::ftruncate(page.fd(), 0), Err(rustix::io::Errno::PERM));
    assert!(Memory::map(page.fd(), 4096, ProtFlags::READ | ProtFlags::WRITE).is_err());
    assert!(Memory::map(page.fd(), 4096, ProtFlags::READ).is_ok());
}

#[test]
fn full_page_is_an_error() {
    let (page, reader) = page(2048);
    let mut blocks: Vec<Block> = std::iter::from_fn(|| page.block(&MANY, &[]).ok()).collect();
    assert!(blocks.len() > 2);
    assert!(matches!(page.block(&MANY, &[]), Err(PageError::Full { .. })));
    assert_eq!(reader.read().unwrap().len(), blocks.len());
    // A clone keeps a block.
    let last = blocks.pop().unwrap();
    let clone = last.clone();
    drop(last);
    assert!(page.block(&MANY, &[]).is_err());
    drop(clone);
    assert_eq!(reader.read().unwrap().len(), blocks.len());
    let block = page.block(&MANY, &[(Label::Lcore, &1)]).unwrap();
    let seen = reader.read().unwrap();
    assert_eq!(seen.last().unwrap().label(Label::Lcore), Some("1"));
    assert!(!seen[0].is_same(&seen[1]));
    drop((page, reader));
    block.counter(11).add(1);
}

#[test]
fn held_blocks_stay_on_the_page() {
    let (page, reader) = page(4096);
    let block = page.block(&TEST, &[]).unwrap();
    block.counter(0).set(3);
    drop(page.block(&MANY, &[]).unwrap());
    let held = page.blocks();
    assert_eq!(held.len(), 1);
    drop(block);
    assert_eq!(reader.read().unwrap()[0].values, [3, 0]);
    drop(held);
    assert_eq!((reader.read().unwrap().len(), page.blocks().len()), (0, 0));
}

#[test]
fn long_labels_are_refused() {
    let (page, _) = page(4096);
    let long = "x".repeat(LABELS);
    assert!(matches!(page.block(&TEST, &[(Label::Channel, &long)]), Err(PageError::Labels { .. })));
    assert!(page.block(&TEST, &[(Label::Channel, &&long[.."channel=\n".len() * 2])]).is_ok());
}

#[test]
fn changing_slots_are_skipped() {
    let (page, reader) = page(4096);
    let _block = page.block(&TEST, &[]).unwrap();
    assert_eq!(reader.read().unwrap().len(), 1);
    page.memory.change(1, || assert_eq!(reader.read().unwrap(), []));
    assert_eq!(reader.read().unwrap().len(), 1);
}

#[test]
fn foreign_files_are_refused() {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let open = |len, seals| {
        let fd = rustix::fs::memfd_create("x", flags).unwrap();
        rustix::fs::ftruncate(&fd, len).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        Reader::open(fd.as_fd())
    };
    assert!(matches!(open(4096, SealFlags::SHRINK), Err(PageError::Foreign { .. })));
    assert!(matches!(open(9, SealFlags::SHRINK), Err(PageError::Foreign { .. })));
    assert!(matches!(open(1 << 40, SealFlags::SHRINK), Err(PageError::TooLong { .. })));
    assert!(matches!(open(4096, SealFlags::GROW), Err(PageError::Unsealed)));
    let (end, _) = rustix::pipe::pipe().unwrap();
    assert!(matches!(Reader::open(end.as_fd()), Err(PageError::Unsealed)));
}

/// Returns value `index` of the blocks with the label `owner`.
fn value_of(owner: u64, index: usize) -> u64 {
    (owner << 8) + index as u64 + 1
}

/// Adds and removes the blocks of a port. Each block has values that tell its owner. Half of the blocks are freed by
/// another thread.
fn add_and_remove(page: &StatsPage, rounds: u64) {
    let (to_other, other) = sync_channel::<Vec<Block>>(8);
    std::thread::scope(|scope| {
        scope.spawn(move || other.into_iter().for_each(drop));
        for round in 0..rounds {
            let family = |queue| if queue % 2 == 0 { &TEST } else { &MANY };
            let blocks = (0..4).map(|queue| {
                let owner = round * 4 + queue;
                let block =
                    page.block(family(queue), &[(Label::Port, &owner), (Label::Queue, &queue)]).unwrap();
                (0..block.len()).for_each(|index| block.counter(index).set(value_of(owner, index)));
                block
            });
            let blocks: Vec<Block> = blocks.collect();
            if round % 2 == 0 {
                to_other.send(blocks).unwrap();
            }
        }
        drop(to_other);
    });
}

#[test]
fn readers_see_whole_blocks_only() {
    let (page, reader) = page(4 << 20);
    let _kept = page.block(&TEST, &[(Label::Port, &u64::from(u32::MAX))]).unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            loop {
                let is_last = is_done.load(Ordering::Relaxed);
                for block in reader.read().unwrap() {
                    let owner: u64 = block.label(Label::Port).unwrap().parse().unwrap();
                    let size = if block.is_of(&TEST) { TEST.size() } else { MANY.size() };
                    assert_eq!(block.values.len(), size);
                    for (index, value) in block.values.iter().enumerate() {
                        let expected = value_of(owner, index);
                        assert!([0, expected].contains(value), "{value:#x} of {owner:#x}: {block:?}");
                    }
                }
                if is_last {
                    break;
                }
            }
        });
        add_and_remove(&page, 100_000);
        is_done.store(true, Ordering::Relaxed);
        reading.join().unwrap();
    });
    assert_eq!(reader.read().unwrap().len(), 1);
}

/// Returns the result of reading a page with these bytes.
fn read(bytes: &[u8]) -> Result<Vec<Snapshot>, PageError> {
    let fd = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::io::pwrite(&fd, bytes, 0).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    Reader::open(fd.as_fd())?.read()
}

fn valid_page() -> Vec<u8> {
    let (page, _) = page(4096);
    let queues: Vec<Block> = (0..4)
        .map(|queue| page.block(if queue < 2 { &TEST } else { &MANY }, &[(Label::Queue, &queue)]).unwrap())
        .collect();
    let mut bytes = vec![0; 4096];
    assert_eq!(rustix::io::pread(page.fd(), &mut bytes, 0).unwrap(), 4096);
    drop(queues);
    bytes
}

/// Each change of a word makes the page invalid.
#[test]
fn damaged_pages_are_refused() {
    let bytes = valid_page();
    assert_eq!(read(&bytes).unwrap().len(), 4);
    let family = at(0, Field::Place);
    let block = |field| at(1, field);
    let offset = |word: usize| u64::from_le_bytes(bytes[word..word + 8].try_into().unwrap());
    let damages = [
        (VERSION_AND_SLOTS, word_of(VERSION, u32::MAX)),
        (VERSION_AND_SLOTS, word_of(VERSION + 1, 6)),
        // A family of another slot, of a block, or far away.
        (block(Field::KindAndFamily), word_of(Kind::Block as u32, 1)),
        (block(Field::KindAndFamily), word_of(Kind::Block as u32, u32::MAX)),
        (block(Field::KindAndFamily), word_of(Kind::Block as u32, 3)),
        // Values outside the page, or of another number.
        (block(Field::Place), word_of(4096 - 8, 2)),
        (block(Field::Place), word_of(u32::MAX, 2)),
        (block(Field::Place), word_of(1, 2)),
        (block(Field::Place), offset(block(Field::Place)) + (1 << 32)),
        // A schema outside the page, cut off, or without text.
        (family, word_of(u32::MAX - 7, 64)),
        (family, word_of(64, u32::MAX)),
        (family, offset(family) - (20 << 32)),
        (family, word_of(HEADER as u32, 64)),
        // Labels without a value, and with invalid UTF-8.
        (block(Field::Labels), u64::from_le_bytes(*b"queue\n1\n")),
        (block(Field::Labels), u64::MAX),
    ];
    for (word, value) in damages {
        let mut damaged = bytes.clone();
        damaged[word..word + 8].copy_from_slice(&value.to_le_bytes());
        assert!(read(&damaged).is_err(), "{value:#x} at {word}: {:?}", read(&damaged));
    }
    assert!(read(&bytes[..HEADER + 3 * SLOT]).is_err());
}

proptest! {
    #[test]
    fn damage_causes_no_panic(
        damages in prop::collection::vec((0..512_usize, prop_oneof![any::<u64>(), 0..4096_u64, 0..8_u64]), 1..8),
        bytes in prop::collection::vec((0..4096_usize, any::<u8>()), 0..8),
        len in prop_oneof![Just(4096), 0..4096_usize],
    ) {
        let mut page = valid_page();
        for (word, value) in damages {
            page[word * 8..word * 8 + 8].copy_from_slice(&value.to_le_bytes());
        }
        for (at, byte) in bytes {
            page[at] = byte;
        }
        page[..8].copy_from_slice(&MAGIC.to_le_bytes());
        page[8..12].copy_from_slice(&VERSION.to_le_bytes());
        let _ = read(&page[..len]);
    }

    #[test]
    fn halves_of_slots_cause_no_panic(
        changes in prop::collection::vec((0..10_u32, 0..4_usize, any::<bool>(), prop_oneof![0..8_u32, 0..4096_u32, any::<u32>()]), 1..6),
        slots in prop_oneof![0..10_u32, any::<u32>()],
    ) {
        let mut page = valid_page();
        page[12..16].copy_from_slice(&slots.to_le_bytes());
        for (slot, word, is_upper, value) in changes {
            let offset = HEADER + slot as usize * SLOT + word * 8 + if is_upper { 4 } else { 0 };
            page[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
        }
        let _ = read(&page);
    }
}
