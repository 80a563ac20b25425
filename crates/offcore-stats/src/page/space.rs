//! The free space of a page.

use std::collections::BTreeMap;

/// Free ranges, by their offsets. Ranges that touch are one range.
#[derive(Debug, Default)]
pub(super) struct Space(BTreeMap<usize, usize>);

impl Space {
    pub(super) fn new(offset: usize, len: usize) -> Self {
        Self([(offset, len)].into_iter().filter(|(_, len)| *len > 0).collect())
    }

    /// Takes `len` bytes from the end of the smallest range that has them. Returns their offset. The first range is
    /// used last, because the directory grows there.
    pub(super) fn take(&mut self, len: usize) -> Option<usize> {
        let first = *self.0.keys().next()?;
        let large = self.0.iter().filter(|(_, free)| **free >= len);
        let (&offset, &free) = large.min_by_key(|(offset, free)| (**offset == first, **free))?;
        match free - len {
            0 => self.0.remove(&offset),
            left => self.0.insert(offset, left),
        };
        Some(offset + free - len)
    }

    /// Takes the `len` bytes at `offset`, if a range begins there and has them.
    pub(super) fn take_at(&mut self, offset: usize, len: usize) -> Option<()> {
        let free = *self.0.get(&offset).filter(|free| **free >= len)?;
        self.0.remove(&offset);
        if free > len {
            self.0.insert(offset + len, free - len);
        }
        Some(())
    }

    /// Returns bytes that were taken.
    pub(super) fn give(&mut self, mut offset: usize, mut len: usize) {
        if let Some(behind) = self.0.remove(&(offset + len)) {
            len += behind;
        }
        if let Some((&before, &free)) = self.0.range(..offset).next_back()
            && before + free == offset
        {
            (offset, len) = (before, len + free);
        }
        self.0.insert(offset, len);
    }

    /// Returns the length of the largest range.
    pub(super) fn largest(&self) -> usize {
        self.0.values().copied().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returned_ranges_are_joined() {
        let mut space = Space::new(64, 640);
        let taken: Vec<usize> = std::iter::from_fn(|| space.take(64)).collect();
        assert_eq!((taken.len(), taken[0], taken[9]), (10, 640, 64));
        for offset in [128, 256, 192, 64] {
            space.give(offset, 64);
        }
        assert_eq!((space.largest(), space.take(320)), (256, None));
        assert_eq!((space.take_at(128, 64), space.take_at(64, 64)), (None, Some(())));
        space.give(640, 64);
        // The smallest range is used first.
        assert_eq!((space.take(64), space.take(192), space.take(1)), (Some(640), Some(128), None));
    }
}
