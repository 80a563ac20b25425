//! Operations on slices: submitted, waited for, and done when the call returns.

use super::engine::Engine;
use super::operation::Operation;
use super::outcome::{Delta, Done, OpsError, Value};
use super::software::dif::{DestinationFlags, DifFlags, SourceFlags, Tags, Update};
use super::software::{Crc, Pattern};

/// Errors are those of [`Engine::run`]: lengths that do not fit ([`OpsError::Length`]), and what an
/// operation's check finds ([`OpsError::Delta`], [`OpsError::Dif`]). Everything that goes wrong with the
/// device, the core makes good.
#[allow(clippy::missing_errors_doc)] // Said above, once.
impl Engine {
    /// Runs an operation on memory that the caller has borrowed.
    fn call(&mut self, operation: Operation) -> Result<Done<Value>, OpsError> {
        // SAFETY: every caller below makes the operation of slices that it has borrowed until this returns:
        // `&[u8]` for what is read, `&mut [u8]` for what is written. When it returns, the operation is
        // complete, or the portal is closed and the core has completed it.
        unsafe { self.run(operation) }
    }

    /// Copies `src` to `dst`, of the same length.
    pub fn copy(&mut self, src: &[u8], dst: &mut [u8]) -> Result<Done<()>, OpsError> {
        Ok(self.call(Operation::Copy { src: src.into(), dst: dst.into() })?.map(drop))
    }

    /// Fills `dst` with the pattern.
    pub fn fill(&mut self, dst: &mut [u8], pattern: Pattern) -> Result<Done<()>, OpsError> {
        Ok(self.call(Operation::Fill { pattern, dst: dst.into() })?.map(drop))
    }

    /// The offset of the first difference of two slices of the same length.
    pub fn compare(&mut self, first: &[u8], second: &[u8]) -> Result<Done<Option<usize>>, OpsError> {
        let done = self.call(Operation::Compare { first: first.into(), second: second.into() })?;
        Ok(done.map(difference))
    }

    /// The offset of the first byte that is not the pattern's, whose least significant byte comes first.
    pub fn compare_pattern(&mut self, src: &[u8], pattern: u64) -> Result<Done<Option<usize>>, OpsError> {
        Ok(self.call(Operation::ComparePattern { src: src.into(), pattern })?.map(difference))
    }

    /// The CRC32C of `src`, going on from `seed`, which is 0 at the start.
    pub fn crc(&mut self, src: &[u8], crc: Crc, seed: u32) -> Result<Done<u32>, OpsError> {
        Ok(self.call(Operation::Crc { src: src.into(), crc, seed })?.map(crc_of))
    }

    /// Copies `src` to `dst`, of the same length, and returns the CRC32C.
    pub fn copy_crc(
        &mut self,
        src: &[u8],
        dst: &mut [u8],
        crc: Crc,
        seed: u32,
    ) -> Result<Done<u32>, OpsError> {
        Ok(self.call(Operation::CopyCrc { src: src.into(), dst: dst.into(), crc, seed })?.map(crc_of))
    }

    /// Copies `src` to two destinations of the same length.
    pub fn dualcast(
        &mut self,
        src: &[u8],
        first: &mut [u8],
        second: &mut [u8],
    ) -> Result<Done<()>, OpsError> {
        let operation = Operation::Dualcast { src: src.into(), first: first.into(), second: second.into() };
        Ok(self.call(operation)?.map(drop))
    }

    /// Writes the delta record that turns `original` into `changed`: of the same length, a multiple of 8, at
    /// most 512 KiB. Ten bytes of record for every 8 bytes that differ.
    pub fn create_delta(
        &mut self,
        original: &[u8],
        changed: &[u8],
        record: &mut [u8],
    ) -> Result<Done<Delta>, OpsError> {
        let (original, changed) = (original.into(), changed.into());
        let done = self.call(Operation::CreateDelta { original, changed, record: record.into() })?;
        Ok(done.map(delta_of))
    }

    /// Applies a delta record to what it was created from.
    pub fn apply_delta(&mut self, record: &[u8], dst: &mut [u8]) -> Result<Done<()>, OpsError> {
        Ok(self.call(Operation::ApplyDelta { record: record.into(), dst: dst.into() })?.map(drop))
    }

    /// Checks the fields of `src`; returns the tags of the block that would follow, as those below do.
    pub fn dif_check(
        &mut self,
        src: &[u8],
        dif: DifFlags,
        flags: SourceFlags,
        tags: Tags,
    ) -> Result<Done<Tags>, OpsError> {
        Ok(self.call(Operation::DifCheck { src: src.into(), dif, flags, tags })?.map(tags_of))
    }

    /// Copies the blocks of `src` with a field behind each.
    pub fn dif_insert(
        &mut self,
        src: &[u8],
        dst: &mut [u8],
        dif: DifFlags,
        flags: DestinationFlags,
        tags: Tags,
    ) -> Result<Done<Tags>, OpsError> {
        let (src, dst) = (src.into(), dst.into());
        Ok(self.call(Operation::DifInsert { src, dst, dif, flags, tags })?.map(tags_of))
    }

    /// Checks the fields of `src` and copies its blocks without them.
    pub fn dif_strip(
        &mut self,
        src: &[u8],
        dst: &mut [u8],
        dif: DifFlags,
        flags: SourceFlags,
        tags: Tags,
    ) -> Result<Done<Tags>, OpsError> {
        let (src, dst) = (src.into(), dst.into());
        Ok(self.call(Operation::DifStrip { src, dst, dif, flags, tags })?.map(tags_of))
    }

    /// Checks the fields of `src` and copies its blocks with new ones. Returns the source's and the
    /// destination's tags.
    pub fn dif_update(
        &mut self,
        src: &[u8],
        dst: &mut [u8],
        update: Update,
        source: Tags,
        destination: Tags,
    ) -> Result<Done<(Tags, Tags)>, OpsError> {
        let (src, dst) = (src.into(), dst.into());
        Ok(self.call(Operation::DifUpdate { src, dst, update, source, destination })?.map(both_tags))
    }

    /// Writes the fields of the blocks of `src`, and only them.
    pub fn dix_generate(
        &mut self,
        src: &[u8],
        dst: &mut [u8],
        dif: DifFlags,
        flags: DestinationFlags,
        tags: Tags,
    ) -> Result<Done<Tags>, OpsError> {
        let (src, dst) = (src.into(), dst.into());
        Ok(self.call(Operation::DixGenerate { src, dst, dif, flags, tags })?.map(tags_of))
    }

    /// Writes the cache lines of `memory` back and removes them from the caches.
    pub fn cache_flush(&mut self, memory: &mut [u8]) -> Result<Done<()>, OpsError> {
        Ok(self.call(Operation::CacheFlush { dst: memory.into() })?.map(drop))
    }

    /// Waits for everything that was submitted before. The tickets are still to be polled.
    pub fn drain(&mut self) -> Result<Done<()>, OpsError> {
        let done = self.call(Operation::Drain)?;
        // What faulted and goes on went in again behind the drain.
        self.wait_for_all();
        Ok(done.map(drop))
    }

    /// A round trip to the device and back.
    pub fn noop(&mut self) -> Result<Done<()>, OpsError> {
        Ok(self.call(Operation::Noop)?.map(drop))
    }
}

fn difference(value: Value) -> Option<usize> {
    let Value::Difference(at) = value else { unreachable!("a comparison ends in {value:?}") };
    at
}

fn crc_of(value: Value) -> u32 {
    let Value::Crc(crc) = value else { unreachable!("a CRC ends in {value:?}") };
    crc
}

fn tags_of(value: Value) -> Tags {
    let Value::Tags(tags) = value else { unreachable!("an operation with fields ends in {value:?}") };
    tags
}

fn both_tags(value: Value) -> (Tags, Tags) {
    let Value::BothTags(source, destination) = value else { unreachable!("an update ends in {value:?}") };
    (source, destination)
}

fn delta_of(value: Value) -> Delta {
    let Value::Delta(delta) = value else { unreachable!("a delta record ends in {value:?}") };
    delta
}
