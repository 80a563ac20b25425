//! Units that are cut into up to 16 equal parts, and lists of units with free parts. Everything is in private memory,
//! and every function takes constant time.

const NONE: u32 = u32::MAX;

/// A unit, identified by its number.
#[derive(Clone, Copy, Debug, Default)]
struct Cut {
    /// A bit for each free part.
    free: u16,
    /// Neighbours in its list, if it has a free part.
    next: u32,
    previous: u32,
}

/// The units of one kind that have free parts. The unit that most recently got its first free part is at the front.
#[derive(Debug)]
pub(super) struct List {
    first: u32,
    /// One bit for each part of a unit of this kind.
    all: u16,
}

impl List {
    /// Creates a list of units that are cut into `parts`.
    pub(super) fn new(parts: u32) -> Self {
        Self { first: NONE, all: u16::MAX >> (16 - parts) }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first == NONE
    }
}

/// All units.
#[derive(Debug, Default)]
pub(super) struct Cuts {
    wholes: Vec<Cut>,
}

impl Cuts {
    /// The size of a unit's entry in bytes.
    pub(super) const PER_UNIT: usize = size_of::<Cut>();

    /// Makes room for `n` more units.
    pub(super) fn add(&mut self, n: usize) {
        self.wholes.resize(self.wholes.len() + n, Cut::default());
    }

    /// Cuts a unit. The parts in `without` are never given out.
    pub(super) fn cut(&mut self, list: &mut List, whole: u32, without: u16) {
        debug_assert_eq!(self.wholes[whole as usize].free, 0);
        self.wholes[whole as usize].free = list.all & !without;
        self.link(list, whole);
    }

    /// Takes a free part of the list's first unit. Returns the numbers of the unit and the part.
    pub(super) fn take(&mut self, list: &mut List) -> Option<(u32, u32)> {
        let whole = list.first;
        let cut = self.wholes.get_mut(whole as usize)?;
        let part = cut.free.trailing_zeros();
        cut.free &= cut.free - 1;
        if cut.free == 0 {
            self.unlink(list, whole);
        }
        Some((whole, part))
    }

    /// Frees a part. Returns `true` if all parts are free and the unit is no longer cut.
    pub(super) fn give(&mut self, list: &mut List, whole: u32, part: u32) -> bool {
        let cut = &mut self.wholes[whole as usize];
        let bit = 1 << part;
        debug_assert!(cut.free & bit == 0 && list.all & bit != 0, "part {part} of {whole} is given twice");
        let first = cut.free == 0;
        cut.free |= bit;
        let complete = cut.free == list.all;
        if first {
            self.link(list, whole);
        }
        if complete {
            self.unlink(list, whole);
            self.wholes[whole as usize].free = 0;
        }
        complete
    }

    fn link(&mut self, list: &mut List, whole: u32) {
        let next = std::mem::replace(&mut list.first, whole);
        let cut = &mut self.wholes[whole as usize];
        (cut.next, cut.previous) = (next, NONE);
        if let Some(next) = self.wholes.get_mut(next as usize) {
            next.previous = whole;
        }
    }

    fn unlink(&mut self, list: &mut List, whole: u32) {
        let Cut { next, previous, .. } = self.wholes[whole as usize];
        match self.wholes.get_mut(previous as usize) {
            Some(previous) => previous.next = next,
            None => list.first = next,
        }
        if let Some(next) = self.wholes.get_mut(next as usize) {
            next.previous = previous;
        }
    }
}
