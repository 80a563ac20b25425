//! The program that is to be run, and whether a library can be preloaded into it.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use object::read::elf::{ElfFile64, FileHeader};
use object::{Object, ObjectSection, elf};

/// Interpreters that are followed: as many as the kernel does.
const DEEPEST: usize = 5;
/// Bytes of the line that names an interpreter, at most.
const LONGEST: usize = 256;

/// Why a program cannot be run on the stack.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProgramError {
    #[error("{}: no such program: expected a path, or a name in PATH", .0.display())]
    NotFound(OsString),
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}: {found}, expected {expected}", path.display())]
    Unfit { path: PathBuf, found: String, expected: &'static str },
}

/// An executable file.
#[derive(Debug)]
pub(super) struct Program {
    path: PathBuf,
}

impl Program {
    /// The program of that name, as a shell looks for it.
    ///
    /// # Errors
    /// When there is none.
    pub(super) fn find(name: &OsStr) -> Result<Self, ProgramError> {
        if name.as_bytes().contains(&b'/') {
            let path = PathBuf::from(name);
            return if is_executable(&path) {
                Ok(Self { path })
            } else {
                Err(ProgramError::NotFound(name.into()))
            };
        }
        let paths = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
        let found =
            std::env::split_paths(&paths).map(|path| path.join(name)).find(|path| is_executable(path));
        found.map(|path| Self { path }).ok_or_else(|| ProgramError::NotFound(name.into()))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses what would run without the library.
    ///
    /// # Errors
    /// What was found, and what was expected.
    pub(super) fn check(&self) -> Result<(), ProgramError> {
        let mut path = self.path.clone();
        for _ in 0..DEEPEST {
            privileges(&path)?;
            match interpreter(&path)? {
                Some(next) => path = next,
                None => return check_elf(&path),
            }
        }
        unfit(&path, "too many interpreters in a row".into(), "a program")
    }
}

fn is_executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

fn unfit<T>(path: &Path, found: String, expected: &'static str) -> Result<T, ProgramError> {
    Err(ProgramError::Unfit { path: path.into(), found, expected })
}

fn read(path: &Path) -> impl FnOnce(std::io::Error) -> ProgramError + '_ {
    |source| ProgramError::Read { path: path.into(), source }
}

/// A program that gets other rights than the caller's: the dynamic linker ignores LD_PRELOAD then.
fn privileges(path: &Path) -> Result<(), ProgramError> {
    let expected = "one without: the dynamic linker preloads nothing into it";
    let found = fs::metadata(path).map_err(read(path))?;
    let ours = fs::metadata("/proc/self").map_err(read(path))?;
    if found.mode() & 0o4000 != 0 && found.uid() != ours.uid() {
        return unfit(path, format!("set-uid to user {}", found.uid()), expected);
    }
    if found.mode() & 0o2000 != 0 && found.gid() != ours.gid() {
        return unfit(path, format!("set-gid to group {}", found.gid()), expected);
    }
    let mut value = [0u8; 64];
    if ours.uid() != 0 && rustix::fs::getxattr(path, "security.capability", &mut value).is_ok() {
        return unfit(path, "file capabilities".into(), expected);
    }
    Ok(())
}

/// The interpreter that a script names.
fn interpreter(path: &Path) -> Result<Option<PathBuf>, ProgramError> {
    let mut first = Vec::new();
    let file = fs::File::open(path).map_err(read(path))?;
    file.take(LONGEST as u64).read_to_end(&mut first).map_err(read(path))?;
    let Some(line) = first.strip_prefix(b"#!") else { return Ok(None) };
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii();
    let mut words = line.split(|byte| matches!(byte, b' ' | b'\t')).filter(|word| !word.is_empty());
    let Some(name) = words.next() else { return unfit(path, "#! without a name".into(), "a program") };
    let name = Path::new(OsStr::from_bytes(name));
    // The program that env looks for is what runs.
    if name.file_name() == Some(OsStr::new("env"))
        && let Some(word) = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='))
    {
        return Program::find(OsStr::from_bytes(word)).map(|program| Some(program.path));
    }
    Ok(Some(name.into()))
}

/// Refuses programs that are not linked with glibc when they are started.
fn check_elf(path: &Path) -> Result<(), ProgramError> {
    let expected = "a program that is linked with glibc when it starts (x86-64, 64 bits)";
    // SAFETY is the reader's: it checks all it reads.
    let bytes = fs::read(path).map_err(read(path))?;
    if !bytes.starts_with(&elf::ELFMAG) {
        return unfit(path, "neither an ELF file nor a script".into(), expected);
    }
    if bytes.get(4) != Some(&elf::ELFCLASS64) {
        return unfit(path, "a program of 32 bits".into(), expected);
    }
    let file: ElfFile64<'_> = match ElfFile64::parse(&*bytes) {
        Ok(file) => file,
        Err(error) => return unfit(path, format!("an ELF file that cannot be read ({error})"), expected),
    };
    let endian = file.endian();
    if file.elf_header().e_machine(endian) != elf::EM_X86_64 {
        return unfit(path, "a program of another processor".into(), expected);
    }
    if file
        .sections()
        .any(|section| section.name().is_ok_and(|name| name == ".go.buildinfo" || name == ".gopclntab"))
    {
        return unfit(path, "a Go program, which makes system calls without libc".into(), expected);
    }
    use object::read::elf::ProgramHeader;
    let linker =
        file.elf_program_headers().iter().find_map(|header| header.interpreter(endian, &*bytes).ok()?);
    match linker {
        None => unfit(path, "statically linked".into(), expected),
        Some(linker) if !linker.ends_with(b"/ld-linux-x86-64.so.2") => {
            unfit(path, format!("loaded by {}", String::from_utf8_lossy(linker)), expected)
        }
        Some(_) => Ok(()),
    }
}
