//! Tests of the attach socket in a directory that another program modifies.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::setup::{path, serve_also};

const OTHER: u32 = 54_321;
const ROUNDS: usize = 300;

#[test]
fn exchanged_files_keep_their_permissions() {
    let [socket, victim, link] = [(); 3].map(|()| path());
    fs::write(&victim, "").unwrap();
    fs::set_permissions(&victim, PermissionsExt::from_mode(0o600)).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let _ = renameat_with(CWD, &socket, CWD, &link, RenameFlags::EXCHANGE);
            }
        });
        for _ in 0..ROUNDS {
            let _ = (fs::remove_file(&socket), fs::remove_file(&link));
            let _ = symlink(&victim, &link);
            let _ = serve_also(&socket, &[OTHER]);
        }
        stop.store(true, Ordering::Relaxed);
    });
    // An access control list would change the group permissions.
    assert_eq!(fs::metadata(&victim).unwrap().permissions().mode() & 0o777, 0o600);
    for left in [socket, victim, link] {
        let _ = fs::remove_file(left);
    }
}
