//! The program to run, and checks that a library can be preloaded into it.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use object::elf::{self, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, read};

/// Maximum number of nested interpreters, as in the kernel.
const MAX_INTERPRETERS: usize = 5;
/// Maximum length of the line that names an interpreter, in bytes.
const LONGEST: usize = 256;

/// The interpreter of scripts that name none.
const SHELL: &str = "/bin/sh";

/// The expected type of file.
const GLIBC: &str = "a program dynamically linked with glibc (x86-64, 64 bits); --fallback kernel runs others on the kernel's network";

/// The reason why a program cannot be run on the stack.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProgramError {
    #[error("{}: program not found: expected a path, or a name in PATH", shown(.0))]
    NotFound(OsString),
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}: {found}, expected {expected}", path.display())]
    Unfit { path: PathBuf, found: String, expected: &'static str },
}

impl ProgramError {
    /// Returns the exit code of `env`, `nohup` and shells for this error.
    pub(super) fn exit_code(&self) -> u8 {
        match self {
            Self::NotFound(_) => 127,
            Self::Read { source, .. } if source.kind() == ErrorKind::NotFound => 127,
            Self::Read { .. } | Self::Unfit { .. } => 126,
        }
    }
}

/// Makes a name visible: a name from a script may end in CR, and a name may be empty.
fn shown(name: &OsStr) -> String {
    if name.is_empty() { "''".into() } else { name.to_string_lossy().escape_debug().to_string() }
}

/// An executable file.
#[derive(Debug)]
pub(super) struct Program {
    path: PathBuf,
    /// The file is a text without an interpreter line.
    by_shell: bool,
}

impl Program {
    /// Finds a program by name, as a shell does.
    ///
    /// # Errors
    /// If it does not exist, or may not be executed.
    pub(super) fn find(name: &OsStr) -> Result<Self, ProgramError> {
        if name.is_empty() {
            return Err(ProgramError::NotFound(name.into()));
        }
        if name.as_bytes().contains(&b'/') {
            return Self::at(name.into());
        }
        let paths = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
        let mut error = ProgramError::NotFound(name.into());
        for path in std::env::split_paths(&paths) {
            match Self::at(path.join(name)) {
                Ok(program) => return Ok(program),
                Err(ProgramError::NotFound(_)) => {}
                Err(found) => error = found,
            }
        }
        Err(error)
    }

    fn at(path: PathBuf) -> Result<Self, ProgramError> {
        let expected = "an executable file";
        match fs::metadata(&path) {
            Ok(found) if found.is_dir() => unfit(&path, "a directory".into(), expected),
            Ok(found) if !found.is_file() => unfit(&path, "no file".into(), expected),
            Ok(found) if found.mode() & 0o111 == 0 => {
                unfit(&path, "a file without execute permission".into(), "an executable one (chmod +x)")
            }
            Ok(_) => Ok(Self { path, by_shell: false }),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                Err(ProgramError::NotFound(path.into()))
            }
            Err(source) => Err(ProgramError::Read { path, source }),
        }
    }

    /// Returns the command that executes the program with `name` as its first argument. A text is executed by a shell,
    /// as in execvp(3).
    pub(super) fn command(&self, name: &OsStr) -> Command {
        if self.by_shell {
            let mut command = Command::new(SHELL);
            command.arg(&self.path);
            return command;
        }
        let mut command = Command::new(&self.path);
        command.arg0(name);
        command
    }

    /// Rejects programs that would run without the library.
    ///
    /// # Errors
    /// The type of program that was found, and the expected type.
    pub(super) fn check(&mut self) -> Result<(), ProgramError> {
        let mut path = self.path.clone();
        for _ in 0..MAX_INTERPRETERS {
            privileges(&path)?;
            let first = beginning(&path)?;
            path = match interpreter(&path, &first)? {
                Some(next) if !next.exists() => return missing(path, &next),
                Some(next) => next,
                None if first.contains(&0) || first.starts_with(&elf::ELFMAG) => return check_elf(&path),
                None => {
                    self.by_shell = true;
                    SHELL.into()
                }
            };
        }
        unfit(&path, "too many interpreters in a row".into(), "a program")
    }
}

fn unfit<T>(path: &Path, found: String, expected: &'static str) -> Result<T, ProgramError> {
    Err(ProgramError::Unfit { path: path.into(), found, expected })
}

fn read_error(path: &Path) -> impl FnOnce(std::io::Error) -> ProgramError + '_ {
    |source| ProgramError::Read { path: path.into(), source }
}

/// Rejects a program with other privileges than the caller's, because the dynamic linker then ignores LD_PRELOAD.
fn privileges(path: &Path) -> Result<(), ProgramError> {
    let expected = "one without: the dynamic linker preloads nothing into it; --fallback kernel runs it on the kernel's network";
    let found = fs::metadata(path).map_err(read_error(path))?;
    let ours = fs::metadata("/proc/self").map_err(read_error(path))?;
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

/// Returns the error of a script whose interpreter does not exist.
fn missing<T>(path: PathBuf, interpreter: &Path) -> Result<T, ProgramError> {
    let ends_in_cr = interpreter.as_os_str().as_bytes().ends_with(b"\r");
    let advice = if ends_in_cr { ": the script's lines end in CR LF, expected LF" } else { "" };
    let found = format!("its interpreter {} was not found{advice}", shown(interpreter.as_os_str()));
    Err(ProgramError::Read { path, source: std::io::Error::new(ErrorKind::NotFound, found) })
}

/// Returns the first bytes of a file. A binary contains zero bytes, a text does not.
fn beginning(path: &Path) -> Result<Vec<u8>, ProgramError> {
    let mut first = Vec::new();
    let file = fs::File::open(path).map_err(read_error(path))?;
    file.take(LONGEST as u64).read_to_end(&mut first).map_err(read_error(path))?;
    Ok(first)
}

/// Returns the interpreter that a script names.
fn interpreter(path: &Path, first: &[u8]) -> Result<Option<PathBuf>, ProgramError> {
    let Some(line) = first.strip_prefix(b"#!") else { return Ok(None) };
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let mut words = line.split(|byte| matches!(byte, b' ' | b'\t')).filter(|word| !word.is_empty());
    let Some(name) = words.next() else { return unfit(path, "#! without a name".into(), "a program") };
    let name = Path::new(OsStr::from_bytes(name));
    // env executes the program that it finds.
    if name.file_name() == Some(OsStr::new("env"))
        && let Some(word) = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='))
    {
        return Program::find(OsStr::from_bytes(word)).map(|program| Some(program.path));
    }
    Ok(Some(name.into()))
}

/// Rejects programs that glibc's dynamic linker does not load.
fn check_elf(path: &Path) -> Result<(), ProgramError> {
    let bytes = fs::read(path).map_err(read_error(path))?;
    match found_in(&bytes) {
        Ok(None) => Ok(()),
        Ok(Some(found)) => unfit(path, found, GLIBC),
        Err(error) => unfit(path, format!("an ELF file that cannot be read ({error})"), GLIBC),
    }
}

/// Describes the error in the content of a program. Returns `None` if glibc's dynamic linker loads it. Only the parts
/// that the kernel reads are checked: other errors, as in the section table, do not prevent a program from running.
fn found_in(bytes: &[u8]) -> Result<Option<String>, read::Error> {
    if !bytes.starts_with(&elf::ELFMAG) {
        return Ok(Some("neither an ELF file nor a script".into()));
    }
    if bytes.get(4) == Some(&elf::ELFCLASS32) {
        return Ok(Some("a 32-bit program".into()));
    }
    let header = FileHeader64::<Endianness>::parse(bytes)?;
    let endian = header.endian()?;
    if header.e_machine(endian) != elf::EM_X86_64 {
        return Ok(Some("a program for another processor".into()));
    }
    if !matches!(header.e_type(endian), elf::ET_EXEC | elf::ET_DYN) {
        return Ok(Some("an ELF file that is not a program, such as an object file".into()));
    }
    if is_go(header, endian, bytes) {
        return Ok(Some("a Go program, which makes system calls without libc".into()));
    }
    for segment in header.program_headers(endian, bytes)? {
        if let Some(linker) = segment.interpreter(endian, bytes)? {
            let is_glibcs = linker.ends_with(b"/ld-linux-x86-64.so.2");
            return Ok((!is_glibcs).then(|| format!("loaded by {}", String::from_utf8_lossy(linker))));
        }
    }
    Ok(Some("statically linked".into()))
}

/// Returns whether a program has the sections that Go's linker creates.
fn is_go(header: &FileHeader64<Endianness>, endian: Endianness, bytes: &[u8]) -> bool {
    let Ok(sections) = header.sections(endian, bytes) else { return false };
    let mut names = sections.iter().map(|section| sections.section_name(endian, section));
    names.any(|name| matches!(name, Ok(b".go.buildinfo" | b".gopclntab")))
}
