//! A reader's side of the page. The page may be damaged or hostile: every offset and length is read once and checked,
//! and the work is limited by the length of the page.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rustix::fs::SealFlags;
use rustix::mm::ProtFlags;

use super::memory::{Field, HEADER, Kind, LABELS, MAGIC, Memory, SLOT, VERSION, VERSION_AND_SLOTS};
use super::memory::{at, halves};
use super::{MAX_LEN, PageError};
use crate::family::{self, Family, Label};

/// Limit for the bytes of values in one reading, as a multiple of the page's length. The same space may be read several
/// times while blocks are freed and created.
const READINGS: usize = 8;

/// A counter of a family, as the page describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    pub name: String,
    /// A name of [`Unit`](family::Unit). A later version of the writer may have other units.
    pub unit: String,
    pub kind: family::Kind,
    pub help: String,
}

/// A family of counters, as the page describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schema {
    pub name: String,
    pub help: String,
    /// The counters, in the order of the values of a block.
    pub columns: Vec<Column>,
}

impl Schema {
    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.split_terminator('\n');
        let (name, help) = lines.next()?.split_once('\t')?;
        let column = |line: &str| {
            let mut fields = line.split('\t');
            let column = Column {
                name: fields.next()?.into(),
                unit: fields.next()?.into(),
                kind: family::Kind::find(fields.next()?)?,
                help: fields.next()?.into(),
            };
            fields.next().is_none().then_some(column)
        };
        let columns: Vec<Column> = lines.take(Family::MAX_COUNTERS + 1).map(column).collect::<Option<_>>()?;
        (columns.len() <= Family::MAX_COUNTERS).then(|| Self {
            name: name.into(),
            help: help.into(),
            columns,
        })
    }
}

/// The contents of a block as seen by a reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub schema: Arc<Schema>,
    /// Keys and values.
    pub labels: Vec<(String, String)>,
    /// The values of the schema's counters.
    pub values: Vec<u64>,
    number: u64,
}

impl Snapshot {
    /// Whether the block is of the family with this name.
    pub fn is_of(&self, family: &Family) -> bool {
        self.schema.name == family.name
    }

    /// Whether both are snapshots of the same block, and not of two blocks with the same labels.
    pub fn is_same(&self, other: &Self) -> bool {
        self.number == other.number
    }

    /// Returns the value of a label.
    pub fn label(&self, label: Label) -> Option<&str> {
        let found = self.labels.iter().find(|(key, _)| key == label.name());
        found.map(|(_, value)| value.as_str())
    }

    /// Returns the value of counter `name`, or 0 if the block has no such counter.
    pub fn value(&self, name: &str) -> u64 {
        let index = self.schema.columns.iter().position(|column| column.name == name);
        index.and_then(|index| self.values.get(index)).copied().unwrap_or(0)
    }
}

/// A reader's side of the page, mapped read-only.
#[derive(Debug)]
pub struct Reader(Memory);

impl Reader {
    /// Maps the page behind `fd`.
    ///
    /// # Errors
    /// [`PageError::Unsealed`], [`PageError::TooLong`], or [`PageError::Foreign`] if it is not a statistics page of
    /// this version.
    pub fn open(fd: BorrowedFd<'_>) -> Result<Self, PageError> {
        // An access to a page behind the end of a file that was truncated would end the process.
        if !rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return Err(PageError::Unsealed);
        }
        let len = usize::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(usize::MAX);
        match len {
            0..HEADER => return Err(PageError::Foreign { magic: 0, version: 0 }),
            HEADER..=MAX_LEN => {}
            found => return Err(PageError::TooLong { found }),
        }
        let memory = Memory::map(fd, len, ProtFlags::READ)?;
        let magic = memory.word(0).load(Ordering::Relaxed);
        let (version, _) = halves(memory.word(VERSION_AND_SLOTS).load(Ordering::Acquire));
        if magic != MAGIC || version != VERSION {
            return Err(PageError::Foreign { magic, version });
        }
        Ok(Self(memory))
    }

    /// Returns the present contents of every block, in the order of their creation. A block that is created or freed
    /// meanwhile may be missing.
    ///
    /// # Errors
    /// [`PageError::Damaged`] if an offset, a length or a text is invalid.
    pub fn read(&self) -> Result<Vec<Snapshot>, PageError> {
        let (_, slots) = halves(self.0.word(VERSION_AND_SLOTS).load(Ordering::Acquire));
        if slots as usize > (self.0.len - HEADER) / SLOT {
            return Err(PageError::Damaged(VERSION_AND_SLOTS));
        }
        let mut reading = Reading {
            memory: &self.0,
            schemas: HashMap::new(),
            texts: self.0.len,
            values: READINGS * self.0.len,
        };
        let blocks = (0..slots).filter_map(|slot| reading.block(slot).transpose());
        let mut blocks = blocks.collect::<Result<Vec<Snapshot>, _>>()?;
        blocks.sort_by_key(|block| block.number);
        Ok(blocks)
    }
}

/// One reading of a page.
struct Reading<'a> {
    memory: &'a Memory,
    /// The families by slot.
    schemas: HashMap<u32, Arc<Schema>>,
    /// Bytes of schemas and of values that may still be read.
    texts: usize,
    values: usize,
}

/// The content of a slot, without the labels.
struct Slot {
    sequence: u64,
    kind: u32,
    family: u32,
    offset: usize,
    len: usize,
    number: u64,
}

impl Reading<'_> {
    /// Returns the block in slot `slot`; `None` if it contains none, or changes.
    fn block(&mut self, slot: u32) -> Result<Option<Snapshot>, PageError> {
        let Some(content) = self.slot(slot)? else { return Ok(None) };
        if content.kind != Kind::Block as u32 {
            return Ok(None);
        }
        let text = self.memory.text(at(slot, Field::Labels), LABELS);
        if !self.is_unchanged(slot, content.sequence)? {
            return Ok(None);
        }
        let damaged = || PageError::Damaged(at(slot, Field::Sequence));
        let labels = labels(&text?).ok_or_else(damaged)?;
        let schema = self.schema(content.family)?;
        if content.len != schema.columns.len() {
            return Err(damaged());
        }
        self.values = self.values.checked_sub(content.len * 8).ok_or_else(damaged)?;
        let value = |index| Some(self.memory.get(content.offset + index * 8)?.load(Ordering::Relaxed));
        let values = (0..content.len).map(value).collect::<Option<Vec<u64>>>().ok_or_else(damaged)?;
        let is_valid = self.is_unchanged(slot, content.sequence)?;
        Ok(is_valid.then_some(Snapshot { schema, labels, values, number: content.number }))
    }

    /// Reads slot `slot`; `None` if it changes.
    fn slot(&self, slot: u32) -> Result<Option<Slot>, PageError> {
        let sequence = self.memory.field(slot, Field::Sequence)?.load(Ordering::Acquire);
        let load = |field| Ok::<_, PageError>(self.memory.field(slot, field)?.load(Ordering::Relaxed));
        let (kind, family) = halves(load(Field::KindAndFamily)?);
        let (offset, len) = halves(load(Field::Place)?);
        let (offset, len, number) = (offset as usize, len as usize, load(Field::Number)?);
        let is_valid = sequence.is_multiple_of(2) && self.is_unchanged(slot, sequence)?;
        Ok(is_valid.then_some(Slot { sequence, kind, family, offset, len, number }))
    }

    /// Whether everything that was read since the load of `sequence` belongs to the same content of the slot. The
    /// writer changes the sequence before it overwrites labels, and before it creates a block with the same space. The
    /// new owner receives the block through a synchronizing operation, so its stores follow the writer's. The supported
    /// processors are multi-copy atomic, so all readers see this order.
    fn is_unchanged(&self, slot: u32, sequence: u64) -> Result<bool, PageError> {
        fence(Ordering::Acquire);
        Ok(self.memory.field(slot, Field::Sequence)?.load(Ordering::Relaxed) == sequence)
    }

    /// Returns the family in slot `slot`. It was written before any block refers to it, and never changes.
    fn schema(&mut self, slot: u32) -> Result<Arc<Schema>, PageError> {
        if let Some(known) = self.schemas.get(&slot) {
            return Ok(Arc::clone(known));
        }
        let damaged = || PageError::Damaged(at(slot, Field::Sequence));
        let content = self.slot(slot)?.filter(|content| content.kind == Kind::Family as u32);
        let Slot { offset, len, .. } = content.ok_or_else(damaged)?;
        self.texts = self.texts.checked_sub(len).ok_or_else(damaged)?;
        let schema = Schema::parse(&self.memory.text(offset, len)?).ok_or_else(damaged)?;
        let schema = Arc::new(schema);
        self.schemas.insert(slot, Arc::clone(&schema));
        Ok(schema)
    }
}

/// Parses lines `KEY=VALUE`, followed by zeros.
fn labels(text: &str) -> Option<Vec<(String, String)>> {
    let lines = text.trim_end_matches('\0').split_terminator('\n');
    lines.map(|line| line.split_once('=').map(|(key, value)| (key.into(), value.into()))).collect()
}
