//! Blocks, slots and tables are taken, freed and taken again.

use std::collections::HashSet;

use super::*;

const MIB: usize = 1 << 20;

fn all<T>(mut take: impl FnMut() -> Option<T>) -> Vec<T> {
    std::iter::from_fn(&mut take).collect()
}

#[test]
fn every_page_is_allocated_once() {
    let mut arena = Arena::new(MIB).unwrap();
    let free = arena.free();
    assert_eq!(free, Free { large: 15, small: 15 });
    let large = all(|| arena.take_large());
    let small = all(|| arena.take_small());
    assert_eq!((large.len(), small.len()), (15, 15));
    let pages: HashSet<u32> = large
        .iter()
        .flat_map(|block| block.page()..block.page() + 16)
        .chain(small.iter().map(|b| b.page()))
        .collect();
    assert_eq!(pages, (1..256).collect());
    assert!(large.iter().all(|&block| arena.address(block).addr().get().is_multiple_of(SMALL)));
    large.into_iter().for_each(|block| arena.give_large(block));
    small.into_iter().for_each(|block| arena.give_small(block));
    assert_eq!(arena.free(), free);
}

#[test]
fn freed_small_blocks_coalesce() {
    let mut arena = Arena::new(MIB).unwrap();
    let mut small = all(|| arena.take_small());
    assert_eq!(small.len(), 255);
    // In an order that uses all lists.
    small.sort_by_key(|block| block.page().wrapping_mul(0x9E37_79B9));
    small.into_iter().for_each(|block| arena.give_small(block));
    assert_eq!(arena.free(), Free { large: 15, small: 15 });
    assert_eq!(all(|| arena.take_large()).len(), 15);
}

#[test]
#[cfg_attr(miri, ignore = "takes minutes")]
fn slots_and_tables_do_not_overlap() {
    let mut arena = Arena::new(2 * LARGE).unwrap();
    let free = arena.free();
    let slots: Vec<Place> = (0..21).map(|_| arena.take_slot().unwrap()).collect();
    let tables: Vec<Place> = (0..9).map(|_| arena.take_table().unwrap()).collect();
    let units: HashSet<u32> = slots
        .iter()
        .map(|p| p.number())
        .chain(tables.iter().flat_map(|p| [p.number(), p.number() + 1]))
        .collect();
    assert_eq!(units.len(), 21 + 2 * 9);
    assert_eq!(arena.free().small, free.small - 3 - 3);
    assert!(arena.take_slot().is_some_and(|place| arena.slot(place).state() == 0));
    let more = all(|| arena.take_table());
    assert_eq!(arena.free(), Free { large: 0, small: 0 });
    arena.give_slot(Place::new(slots[20].number() + 1).unwrap());
    slots.into_iter().for_each(|place| arena.give_slot(place));
    tables.into_iter().chain(more).for_each(|place| arena.give_table(place));
    assert_eq!(arena.free(), free);
}

#[test]
fn reserve_serves_only_reserved_requests() {
    let mut arena = Arena::new(MIB).unwrap();
    arena.reserve(4);
    let mut large = all(|| arena.take_large());
    assert_eq!(large.len(), 11);
    assert_eq!(all(|| arena.take_small()).len(), 15, "no large block of the reserve is cut");
    large.push(arena.take_reserved().unwrap());
    arena.give_large(large.pop().unwrap());
    assert!(arena.take_large().is_none(), "what is given back fills the reserve first");
    arena.give_large(large.pop().unwrap());
    assert!(arena.take_large().is_some());
    assert_eq!(all(|| arena.take_reserved()).len(), 4);
    assert!(arena.small_of(Share::Reserved).is_none());
}

#[test]
fn arena_grows_to_its_limit() {
    let mut arena = Arena::new(SEGMENT + LARGE).unwrap();
    assert_eq!(arena.free().large, SEGMENT / LARGE - 1);
    let view = Arc::clone(arena.memory());
    assert!(arena.grow().unwrap());
    assert!(!arena.grow().unwrap());
    let far = all(|| arena.take_large()).pop().unwrap();
    assert_eq!(far.page() as usize, PAGES, "blocks of the first segment are used first");
    // A reference from before the arena grew also includes the new segment, and keeps it mapped after the arena is
    // dropped.
    drop(arena);
    let address = view.address(far, LARGE - 1, 1).unwrap();
    // SAFETY: one byte of a block in a segment that `view` keeps mapped.
    unsafe {
        address.write_volatile(7);
        assert_eq!(address.read_volatile(), 7);
    }
    assert!(view.address(far, LARGE, 2 * MIB).is_none());
    // A place or a block outside of all segments has no address.
    assert!(view.slot(Place::new(u32::MAX).unwrap()).is_none());
    assert!(view.address(Block::new(u32::MAX).unwrap(), 0, 1).is_none());
}

#[test]
#[cfg_attr(miri, ignore = "asks how many pages a memfd has")]
fn shared_memory_is_allocated_as_used() {
    // The kernel counts allocated pages in units of 512 bytes.
    let allocated = |arena: &Arena| {
        let blocks =
            |(fd, _)| rustix::fs::fstat(fd).map(|found| usize::try_from(found.st_blocks).unwrap()).unwrap();
        arena.memory().segments().map(blocks).sum::<usize>() * 512
    };
    let mut arena = Arena::shared(2 * SEGMENT, Arc::default()).unwrap();
    assert!(arena.grow().unwrap());
    assert!(allocated(&arena) < MIB, "{} bytes of 128 MiB", allocated(&arena));
    let use_some = |arena: &mut Arena| {
        let taken: Vec<Block> = (0..32).map(|_| arena.take_large().unwrap()).collect();
        for block in taken {
            // SAFETY: the block has `LARGE` bytes, which only this test uses.
            unsafe { std::ptr::write_bytes(arena.address(block).as_ptr(), 1, LARGE) };
            arena.give_large(block);
        }
        allocated(arena)
    };
    let used = use_some(&mut arena);
    assert!((2 * MIB..3 * MIB).contains(&used), "{used} bytes of 2 MiB");
    assert_eq!(use_some(&mut arena), used, "used blocks are used again");
}

#[test]
fn arenas_share_a_budget() {
    let budget = Arc::new(Budget::new(20 * LARGE));
    let new = || Arc::new(Charge::new(Arc::clone(&budget)));
    let keep = new();
    let mut first = Arena::shared(MIB, Arc::clone(&keep)).unwrap();
    let mut second = Arena::shared(MIB, new()).unwrap();
    // Each arena keeps block 0.
    assert_eq!(all(|| first.take_large()).len(), 15);
    assert_eq!(second.spare(), 3);
    let taken = all(|| second.take_large());
    assert_eq!(taken.len(), 3);
    assert_eq!((second.spare(), second.free().large), (0, 0));
    let (len, limit) = second.len_and_limit();
    assert_eq!((len, limit), (4 * LARGE, 4 * LARGE), "nothing can be added");
    assert!(Arena::shared(MIB, new()).is_err(), "the budget is used up");
    // Used blocks need no room in the budget.
    taken.into_iter().for_each(|block| second.give_large(block));
    assert_eq!((second.spare(), all(|| second.take_large()).len()), (3, 3));
    drop(first);
    assert_eq!(second.spare(), 0, "its segments may still be mapped");
    drop(keep);
    assert_eq!(all(|| second.take_large()).len(), 12);
}

#[test]
fn lists_of_segments_are_charged() {
    let budget = Arc::new(Budget::new(8 * LARGE));
    let new = || Arena::shared(64 * MIB, Arc::new(Charge::new(Arc::clone(&budget))));
    // The lists of a segment of 64 MiB take three blocks, and block 0 takes one more.
    let mut first = new().unwrap();
    let second = new().unwrap();
    assert!(new().is_err());
    assert!(first.take_large().is_none());
    drop(second);
    assert_eq!(all(|| first.take_large()).len(), 4);
}

#[test]
fn blocks_are_paid_together() {
    let budget = Arc::new(Budget::new(5 * LARGE));
    let mut arena = Arena::shared(MIB, Arc::new(Charge::new(Arc::clone(&budget)))).unwrap();
    let slot = arena.take_slot().unwrap();
    let mut tx = crate::Fifo::<crate::Tx>::new(slot);
    // One block has the slot and tables, so four are left.
    assert!(!tx.grant(&mut arena, 6 * LARGE as u64));
    assert_eq!((arena.spare(), tx.end()), (4, 0), "all or none");
    assert!(tx.grant(&mut arena, 4 * LARGE as u64));
    assert_eq!((arena.spare(), tx.end()), (0, 4 * LARGE as u64));
    assert_eq!(tx.pieces(&arena, 0, 4 * LARGE).map(|(_, len)| len).sum::<usize>(), 4 * LARGE);
}

#[test]
fn promised_blocks_are_kept() {
    let mut arena = Arena::new(MIB).unwrap();
    arena.promise(0, 5 * SMALLS);
    assert_eq!((arena.spare(), arena.promised()), (10, 5));
    assert_eq!(all(|| arena.take_large()).len(), 10);
    assert!(arena.take_reserved().is_some(), "a window takes them");
    arena.promise(5 * SMALLS, 0);
    assert_eq!(all(|| arena.take_large()).len(), 4);
}
