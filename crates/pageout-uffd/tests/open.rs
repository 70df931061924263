//! Opening on the real kernel, with and without privileges.

mod common;

use std::os::fd::AsFd;
use std::thread;

use pageout_uffd::{Errno, Features, OpenError, Uffd};
use rustix::thread::set_thread_res_uid;
use rustix::thread::Uid;

/// Runs `test` on a thread that is nobody; `None`, with the reason printed, where it cannot be done.
fn as_nobody<T: Send>(test: impl FnOnce() -> T + Send) -> Option<T> {
    let nobody = Uid::from_raw(65534);
    thread::scope(|scope| {
        let thread = scope.spawn(|| match set_thread_res_uid(nobody, nobody, nobody) {
            Ok(()) => Some(test()),
            Err(errno) => {
                println!("skipped: cannot become nobody: {errno}");
                None
            }
        });
        thread.join().unwrap()
    })
}

#[test]
fn what_is_offered_can_be_had() {
    let Ok(offered) = Uffd::supported().map_err(|error| println!("skipped: {error}")) else { return };
    println!("this kernel offers {offered}");
    // SIGBUS delivery and events exclude nothing; forks need a privilege.
    let wanted = Features::all() & (offered - Features::EVENT_FORK);
    Uffd::open(wanted, false).unwrap();
}

#[test]
fn features_that_are_missing_are_named() {
    if common::context(Features::empty()).is_none() {
        return;
    }
    let unknown = Features::from_bits_retain(1 << 60);
    let error = Uffd::open(unknown | Features::THREAD_ID, true).unwrap_err();
    let OpenError::Missing { missing, offered } = error else { panic!("{error:?}") };
    assert_eq!(missing, unknown);
    assert!(offered.contains(Features::THREAD_ID));
}

#[test]
fn without_privileges_the_error_says_what_to_do() {
    let Some(result) = as_nobody(|| Uffd::open(Features::empty(), true)) else { return };
    match result {
        Ok(_) => println!("skipped: this system gives a context to everybody"),
        Err(error @ OpenError::UserModeOnly { device: Errno::ACCESS }) => assert_eq!(
            error.to_string(),
            "userfaultfd: /dev/userfaultfd: permission denied, userfaultfd(2): without faults in system calls \
             only; let the user read and write /dev/userfaultfd (setfacl -m u:USER:rw /dev/userfaultfd)"
        ),
        Err(error) => println!("skipped: refused in another way here: {error}"),
    }
}

#[test]
fn a_device_opened_before_is_enough_for_all_but_forks() {
    let Ok(device) = Uffd::open_device().map_err(|errno| println!("skipped: {errno}")) else { return };
    let open = |features| Uffd::open_on(device.as_fd(), features, true);
    let Some((plain, fork)) = as_nobody(|| (open(Features::MOVE), open(Features::EVENT_FORK))) else {
        return;
    };
    assert!(!matches!(plain, Err(OpenError::Device(_))), "{plain:?}");
    assert_eq!(fork.unwrap_err(), OpenError::ForkNotPermitted);
}

#[test]
fn another_descriptor_is_no_device() {
    let file = std::fs::File::open("/dev/null").unwrap();
    let error = Uffd::open_on(file.as_fd(), Features::empty(), true).unwrap_err();
    assert_eq!(error, OpenError::Device(Errno::NOTTY));
    assert!(error.to_string().contains("not a userfaultfd device"), "{error}");
}
