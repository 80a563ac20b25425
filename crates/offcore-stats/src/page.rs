//! The shared statistics page: blocks of single-writer counters in a memfd, which describes itself.
//!
//! ```text
//! page    | magic u64 | version u32, slots u32 | zeros up to 64 bytes | slots ... | free ... | schemas, values |
//! slot    | sequence u64 | kind u32, family u32 | offset u32, length u32 | number u64 | labels, 96 bytes |
//! schema  | "NAME\tHELP\n" of the family, then "NAME\tUNIT\tKIND\tHELP\n" of each counter |
//! values  | counters x 8 B, own cache lines |
//! ```
//! The slots are the directory of the page. A slot has 128 bytes. Its kind is 0 if it is free, 1 if it contains a
//! family, and 2 if it contains a block.
//!
//! * In the slot of a family, offset and length describe the schema. The length is in bytes. A family is written once,
//!   before its first block, and never changes.
//! * In the slot of a block, offset and length describe the values. The length is the number of counters. The field
//!   `family` is the number of the slot of the block's [family](crate::family). Each block has a unique `number`. The
//!   labels are lines `KEY=VALUE`, followed by zeros.
//!
//! Numbers are little-endian, texts are UTF-8. One worker stores the values of a block, and any process loads them.
//!
//! The page reuses the slot and the values of a block after the last handle of the block is dropped. The sequence of
//! a slot is odd while the slot changes, and each change increases it. A reader loads the sequence before and after the
//! other fields and the values. It ignores them if the sequence is odd or has changed. Therefore, it never sees the
//! labels of one block with the values of another.
//!
//! A reader in another process, or of another version of Offcore, needs no knowledge of the families. An incompatible
//! layout has a new version number.

mod memory;
mod reader;
mod space;

use std::fmt::{Display, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::ProtFlags;

use crate::counter::Counter;
use crate::family::{Family, Label};
use memory::{Field, HEADER, Kind, LABELS, LINE, MAGIC, Memory, SLOT, VERSION, VERSION_AND_SLOTS};
use memory::{at, word_of};
use space::Space;

pub use reader::{Column, Reader, Schema, Snapshot};

/// Maximum length of a page in bytes.
const MAX_LEN: usize = 16 << 20;

/// Errors of a statistics page.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum PageError {
    /// statistics page: {0}
    System(#[from] rustix::io::Errno),
    /// statistics page is full: a block of family '{name}' needs {needed} bytes, the largest free range has {left}
    Full { name: String, needed: usize, left: usize },
    /// labels of a block need {found} bytes, expected at most {LABELS:?}: '{labels}'
    Labels { labels: String, found: usize },
    /// statistics page has {found} bytes, expected at most {MAX_LEN:?}
    TooLong { found: usize },
    /// not a statistics page: expected a memfd that is sealed against truncation
    Unsealed,
    /// not a statistics page of version {VERSION:?}: magic {magic:#x}, version {version}
    Foreign { magic: u64, version: u32 },
    /// statistics page is damaged at offset {0}
    Damaged(usize),
}

/// The writer's side of the page, which creates blocks. Cold path only.
#[derive(Debug)]
pub struct StatsPage {
    memory: Arc<Memory>,
    fd: OwnedFd,
    directory: Mutex<Directory>,
    freed: Sender<Place>,
}

/// The writer's view of the page's space.
#[derive(Debug)]
struct Directory {
    space: Space,
    /// The owner of the block in each slot.
    slots: Vec<Weak<Owner>>,
    free_slots: Vec<u32>,
    /// Families on the page, with their slots.
    families: Vec<(&'static Family, u32)>,
    /// Number of the next block.
    number: u64,
    freed: Receiver<Place>,
}

/// The slot of a block, and the offset and bytes of its values.
#[derive(Clone, Copy, Debug)]
struct Place {
    slot: u32,
    offset: usize,
    len: usize,
}

impl StatsPage {
    /// Creates a page of `len` bytes in a new memfd.
    ///
    /// # Errors
    /// The kernel has no memory for it, or `len` is too long.
    ///
    /// # Panics
    /// If `len` is not a multiple of 64.
    pub fn new(len: usize) -> Result<Self, PageError> {
        assert!(
            len >= HEADER && len.is_multiple_of(LINE),
            "a page of {len} bytes: expected a multiple of 64"
        );
        if len > MAX_LEN {
            return Err(PageError::TooLong { found: len });
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("offcore-stats", flags)?;
        rustix::fs::ftruncate(&fd, len as u64)?;
        let memory = Memory::map(fd.as_fd(), len, ProtFlags::READ | ProtFlags::WRITE)?;
        // Other processes with this fd can neither remove pages from the memfd nor write to it.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals)?;
        memory.word(0).store(MAGIC, Ordering::Relaxed);
        memory.word(VERSION_AND_SLOTS).store(word_of(VERSION, 0), Ordering::Release);
        let (sender, receiver) = channel();
        let directory = Directory {
            space: Space::new(HEADER, len - HEADER),
            slots: Vec::new(),
            free_slots: Vec::new(),
            families: Vec::new(),
            number: 0,
            freed: receiver,
        };
        Ok(Self { memory: Arc::new(memory), fd, directory: Mutex::new(directory), freed: sender })
    }

    /// Returns the memfd, to be mapped by readers.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Creates a block of the family's counters with these labels. All counters are 0. The block's space is used again
    /// after the last clone of the block has been dropped.
    ///
    /// # Errors
    /// [`PageError::Full`], or [`PageError::Labels`].
    pub fn block(
        &self,
        family: &'static Family,
        labels: &[(Label, &dyn Display)],
    ) -> Result<Block, PageError> {
        let labels = text_of(labels)?;
        let mut directory = self.directory.lock().unwrap_or_else(PoisonError::into_inner);
        directory.collect();
        let memory = &*self.memory;
        let full = |needed, left| PageError::Full { name: family.name.into(), needed, left };
        let family_slot = directory.family(memory, family, full)?;
        let len = (family.size() * 8).next_multiple_of(LINE);
        let slot = directory.slot(memory).map_err(|left| full(SLOT, left))?;
        let Some(offset) = directory.space.take(len) else {
            directory.free_slots.push(slot);
            return Err(full(len, directory.space.largest()));
        };
        let number = directory.number;
        directory.number += 1;
        memory.change(slot, || {
            memory.store_text(offset, &[], len);
            memory.store_text(at(slot, Field::Labels), labels.as_bytes(), LABELS);
            let store = |field, value| memory.word(at(slot, field)).store(value, Ordering::Relaxed);
            store(Field::KindAndFamily, word_of(Kind::Block as u32, family_slot));
            store(Field::Place, word_of(offset as u32, family.size() as u32));
            store(Field::Number, number);
        });
        let values = memory.range(offset, len).ok_or(PageError::Damaged(offset))?.cast();
        let values = Values { first: values, len: family.size() };
        let (memory, freed) = (Arc::clone(&self.memory), self.freed.clone());
        let owner = Arc::new(Owner::Page { memory, place: Place { slot, offset, len }, values, freed });
        directory.slots[slot as usize] = Arc::downgrade(&owner);
        Ok(Block { _owner: owner, values })
    }

    /// Returns a handle of each present block. The blocks stay on the page while these handles exist, so a last report
    /// can show the counters of workers that have ended.
    pub fn blocks(&self) -> Vec<Block> {
        let directory = self.directory.lock().unwrap_or_else(PoisonError::into_inner);
        directory.slots.iter().filter_map(Weak::upgrade).filter_map(Block::of).collect()
    }
}

impl Directory {
    /// Collects the space of blocks that were dropped.
    fn collect(&mut self) {
        while let Ok(Place { slot, offset, len }) = self.freed.try_recv() {
            self.free_slots.push(slot);
            self.space.give(offset, len);
        }
    }

    /// Returns a free slot, or the bytes that are left.
    fn slot(&mut self, memory: &Memory) -> Result<u32, usize> {
        if let Some(slot) = self.free_slots.pop() {
            return Ok(slot);
        }
        let slot = self.slots.len() as u32;
        self.space.take_at(at(slot, Field::Sequence), SLOT).ok_or_else(|| self.space.largest())?;
        // The space may have held values.
        memory.store_text(at(slot, Field::Sequence), &[], SLOT);
        self.slots.push(Weak::new());
        memory.word(VERSION_AND_SLOTS).store(word_of(VERSION, slot + 1), Ordering::Release);
        Ok(slot)
    }

    /// Returns the slot of `family`, which is written to the page if it is not there.
    fn family(
        &mut self,
        memory: &Memory,
        family: &'static Family,
        full: impl Fn(usize, usize) -> PageError,
    ) -> Result<u32, PageError> {
        if let Some((_, slot)) = self.families.iter().find(|(known, _)| *known == family) {
            return Ok(*slot);
        }
        let text = schema_of(family);
        let len = text.len().next_multiple_of(LINE);
        let slot = self.slot(memory).map_err(|left| full(SLOT, left))?;
        let Some(offset) = self.space.take(len) else {
            self.free_slots.push(slot);
            return Err(full(len, self.space.largest()));
        };
        memory.change(slot, || {
            memory.store_text(offset, text.as_bytes(), len);
            let store = |field, value| memory.word(at(slot, field)).store(value, Ordering::Relaxed);
            store(Field::KindAndFamily, word_of(Kind::Family as u32, 0));
            store(Field::Place, word_of(offset as u32, text.len() as u32));
        });
        self.families.push((family, slot));
        Ok(slot)
    }
}

/// Returns the text of a family's schema.
fn schema_of(family: &Family) -> String {
    let mut text = format!("{}\t{}\n", family.name, family.help);
    for counter in family.counters() {
        let _ = writeln!(text, "{}\t{}\t{}\t{}", counter.name, counter.unit, counter.kind, counter.help);
    }
    text
}

/// Returns the text of a block's labels. Control characters in values become question marks.
fn text_of(labels: &[(Label, &dyn Display)]) -> Result<String, PageError> {
    let mut text = String::new();
    for (label, value) in labels {
        let _ = writeln!(text, "{label}={}", value.to_string().replace(char::is_control, "?"));
    }
    match text.len() {
        0..=LABELS => Ok(text),
        found => Err(PageError::Labels { labels: text.replace('\n', ","), found }),
    }
}

/// A block of counters: a part of the page that one worker writes.
#[derive(Clone, Debug)]
pub struct Block {
    _owner: Arc<Owner>,
    values: Values,
}

/// The address and number of a block's values.
#[derive(Clone, Copy, Debug)]
struct Values {
    first: NonNull<Counter>,
    len: usize,
}

// SAFETY: the values are atomics, and a block's owner keeps them alive.
unsafe impl Send for Values {}
// SAFETY: as for `Send`; the values are atomics.
unsafe impl Sync for Values {}

/// The owner of a block's values.
#[derive(Debug)]
enum Owner {
    Page { memory: Arc<Memory>, place: Place, values: Values, freed: Sender<Place> },
    Private { _counters: Arc<[Counter]> },
}

impl Drop for Owner {
    /// Frees the slot without a lock, because a worker may drop the last handle of a block.
    fn drop(&mut self) {
        if let Self::Page { memory, place, freed, .. } = self {
            let kind = memory.word(at(place.slot, Field::KindAndFamily));
            memory.change(place.slot, || kind.store(word_of(Kind::Free as u32, 0), Ordering::Relaxed));
            // Without the page, nothing uses the space.
            let _ = freed.send(*place);
        }
    }
}

impl Block {
    /// Creates a block outside any page, for tests and benchmarks.
    pub fn private(family: &Family) -> Self {
        let len = family.size();
        let counters: Arc<[Counter]> = (0..len).map(|_| Counter::new()).collect();
        let values = Values { first: NonNull::from(&*counters).cast(), len };
        Self { _owner: Arc::new(Owner::Private { _counters: counters }), values }
    }

    /// Returns a handle of an owner's block.
    fn of(owner: Arc<Owner>) -> Option<Self> {
        match *owner {
            Owner::Page { values, .. } => Some(Self { _owner: owner, values }),
            Owner::Private { .. } => None,
        }
    }

    /// Returns the number of counters.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.values.len
    }

    /// Returns counter `index`, in the order of the family's declaration.
    ///
    /// # Panics
    /// If `index` is not below [`Block::len`].
    #[inline(always)]
    pub fn counter(&self, index: usize) -> &Counter {
        assert!(index < self.values.len);
        // SAFETY: `first` points to `len` counters that live as long as self; the index was just checked.
        unsafe { self.values.first.add(index).as_ref() }
    }

    /// Stores `values` in the first counters, in order.
    pub fn set(&self, values: impl IntoIterator<Item = u64>) {
        for (index, value) in values.into_iter().enumerate() {
            self.counter(index).set(value);
        }
    }
}

#[cfg(test)]
mod tests;
