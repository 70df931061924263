//! What `pageout run` and the keepers of its processes say to each other.
//!
//! One `SOCK_SEQPACKET` connection a process, over the Unix socket that [`ENV_RUN`] names. A message is
//! one [`Message`], descriptors travel beside it as `SCM_RIGHTS`. The connection is the life sign: when a
//! keeper ends, however it ends, the kernel closes it and `run` takes its trunks back.
//!
//! ```text
//! keeper                                   run
//!   Hello {pid, VERSION}              ──►
//!                                     ◄──  Welcome {seat | NONE, Settings}
//!                                          + [statistics memfd, tree memfd, /dev/userfaultfd if ANY_USER,
//!                                             device 0, device 1, ...]
//!   Lease {serial}                    ──►                        (a trunk: a piece of a device, 2 to 64 MiB)
//!                                     ◄──  Leased {serial, first trunk | NONE, how many}
//!   Return {serial, trunk}            ──►                        no slot of it has a name, in no process
//!                                     ◄──  Short                 somebody gets none: all that are empty are wanted
//!                                     ◄──  Needed                others lack memory, of which it has more than its share
//!   Holding                           ──►  + [userfaultfd]       from here on run keeps the registration
//!                                                                alive: if the keeper dies, the program's
//!                                                                faults wait, and run ends the program
//!   Bequest {token}                  ──►  + [memfd]             before a fork with pages out; Cancel if it fails
//!   Born {token, pid}                ──►                        the fork is through: who will ask for it
//!   Inherit {token}                  ──►                        its child, before it goes on
//!                                     ◄──  Bequest {token | NONE}  + [the memfd]
//!   Apart                             ──►                        nothing that it inherited is read any more
//!   Full                              ──►                        it grows beyond its limit, for no device has room
//!   Over {bytes, least, has settled}  ──►                        what cannot go is more than the limit
//!   Unusable {serial} text            ──►                        it cannot use a device; why
//!   Log {level} text                  ──►
//!   Unlimited text                    ──►                        the keeper ends before it has begun; why
//!   Guest {pid}                       ──►                        the process ended, and another has its memory
//!                                     ◄──  On {number, DeviceSettings} + [device]
//!                                     ◄──  Off {number, serial}  nothing more goes there, what is there comes home
//!                                     ◄──  Stay {number, serial} not off after all
//!   Gone {number, serial}             ──►                        nothing is there, and it is closed; trunks go back
//!   Bye {reason}                      ──►                        the keeper ends on purpose
//!
//! controller (of the same user)            run
//!   Look                              ──►
//!                                     ◄──  View              + [memfd of JSON: all that there is to see]
//!   Switch {on or off}                ──►                      + [memfd of JSON: what]
//!                                     ◄──  Switched {how}     + [memfd of text: which, or why not]
//! ```
//! After `Holding`, an end of the connection without `Bye` while the program lives is fatal for it.
//! A keeper sends one `Gone` for each device that it was given by `Welcome` or `On`, and `run` gives it again only after
//! that. Who ends while a device that it switched off is on its way takes that back.
//!
//! If `run` is the one that ends, keepers go on with what they have.

/// Environment variable: path of the socket of the run that a process belongs to.
pub const ENV_RUN: &str = "PAGEOUT_RUN";
/// Digits with which run writes its own number, zeros first, where the program's is to stand: no number has as many.
pub const PADDED_PID: usize = 10;
/// Changes whenever [`Message`] or [`Settings`] change.
pub const VERSION: u64 = 14;
/// Most devices of a run.
pub const DEVICES: usize = 8;
/// Pages in a cluster, of which a trunk has some.
pub const CLUSTER_SLOTS: u64 = crate::slot::CLUSTER_SLOTS as u64;
/// The most clusters in a trunk: 64 MiB.
pub const TRUNK_CLUSTERS: u64 = crate::slot::TRUNK_CLUSTERS as u64;
/// In `Leased`: no trunk is left. In `Welcome`: no seat.
pub const NONE: u64 = u64::MAX;

/// Is [`Kind::Over`] worth to be said of so many `bytes`, after it was of `told`? What has come to rest is said again at a quarter
/// more; else at twice as much.
pub fn is_news(told: u64, bytes: u64, has_settled: bool) -> bool {
    has_settled && bytes >= told + told / 4 || bytes >= 2 * told
}

/// Reason of a [`Kind::Bye`]: the program ended.
pub const BYE_ENDED: u64 = 0;
/// It executed another program.
pub const BYE_EXEC: u64 = 1;
/// The engine stops and the program must be stopped; a [`Kind::Log`] before says why.
pub const BYE_STOP: u64 = 2;
/// The keeper steps aside, and nothing is out.
pub const BYE_ASIDE: u64 = 3;

/// Flag of a device: what is free there is discarded.
pub const DISCARDS: u16 = 1;
/// It is a disk that turns.
pub const ROTATIONAL: u16 = 2;
/// Its page 0 is a header, which stays.
pub const HEADER: u16 = 4;

/// What a message is.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `a` process, as the keeper calls it, `c` [`VERSION`].
    Hello = 1,
    /// `a` seat in the tree ([`crate::tree`]) or [`NONE`]; payload: [`Settings`].
    Welcome = 2,
    /// `a` serial of a device.
    Lease = 3,
    /// `a` serial, `b` first trunk or [`NONE`], `c` how many.
    Leased = 4,
    /// `a` serial, `b` trunk.
    Return = 5,
    /// The registration is in use; the userfaultfd comes along.
    Holding = 6,
    /// `a` level (0 error, 1 warning, 2 info, 3 debug), `text` one line of UTF-8, no newline.
    Log = 7,
    /// `a` the reason: [`BYE_ENDED`], [`BYE_EXEC`], [`BYE_STOP`] or [`BYE_ASIDE`].
    Bye = 8,
    /// Not from a keeper: what is there to see?
    Look = 9,
    /// The answer comes along as a file.
    View = 10,
    /// `a` number of a device; payload: [`DeviceSettings`]; the device comes along.
    On = 11,
    /// `a` number, `b` serial.
    Off = 12,
    /// `a` number, `b` serial.
    Stay = 13,
    /// `a` number, `b` serial.
    Gone = 14,
    /// Not from a keeper: `a` 0 on, 1 off; what comes along as a file.
    Switch = 19,
    /// `a` 0 it is done, 1 it is not, 2 it is under way; words come along as a file.
    Switched = 20,
    /// `a` a random number of the keeper's, by which the child asks; the file of a [`crate::swap::heir::Bequest`] comes along. In the answer [`NONE`], and
    /// no file, if there is none.
    Bequest = 16,
    /// `a` the bequest, `b` the process that is to inherit it.
    Born = 25,
    /// `a` the bequest.
    Inherit = 17,
    /// `a` the bequest.
    Cancel = 18,
    /// Trunks are short: those that are empty are wanted.
    Short = 21,
    /// `text` why the process cannot be limited: said once for each program.
    Unlimited = 22,
    /// `a` another process that has the memory, which its keeper keeps for that from now on.
    Guest = 23,
    /// Others lack memory, and the process has more than its share. From a keeper: it lacks memory, and has no share.
    Needed = 24,
    /// Nothing is read any more of what was inherited: it has come home, or been written over.
    Apart = 26,
    /// No device has room, and has had none for a while: the process grows beyond its limit.
    Full = 27,
    /// `a` bytes that cannot go, of all processes together; `b` the least limit that can be kept; `c` is 1 if that has come to
    /// rest, else 0.
    Over = 28,
    /// `a` the serial of a device that the process cannot use, `text` why: said once for all.
    Unusable = 29,
}

impl Kind {
    /// The kind with this number.
    pub fn from_raw(raw: u32) -> Option<Kind> {
        use Kind::*;
        [
            Hello, Welcome, Lease, Leased, Return, Holding, Log, Bye, Look, View, On, Off, Stay, Gone,
            Bequest, Born, Inherit, Cancel, Switch, Switched, Short, Unlimited, Guest, Needed, Apart, Full,
            Over, Unusable,
        ]
        .into_iter()
        .find(|k| *k as u32 == raw)
    }
}

/// Integers without padding: all bytes are there, and any are valid.
///
/// # Safety
/// It is so.
unsafe trait Plain: Copy {}
// SAFETY: see the checks of their sizes at the end.
unsafe impl Plain for Message {}
// SAFETY: as above.
unsafe impl Plain for Settings {}
// SAFETY: as above.
unsafe impl Plain for DeviceSettings {}

fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: it is plain.
    unsafe { core::slice::from_raw_parts((value as *const T).cast(), size_of::<T>()) }
}

/// One message, always sent whole.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Message {
    /// A [`Kind`].
    pub kind: u32,
    /// Bytes of `text` in use.
    pub len: u32,
    /// See [`Kind`].
    pub a: u64,
    /// See [`Kind`].
    pub b: u64,
    /// See [`Kind`].
    pub c: u64,
    /// The text of a `Log`, `Unlimited` or `Unusable`, or the bytes of [`Settings`] or [`DeviceSettings`].
    pub text: [u8; 256],
}

impl Message {
    /// A message without text.
    pub const fn new(kind: Kind, a: u64, b: u64, c: u64) -> Self {
        Self { kind: kind as u32, len: 0, a, b, c, text: [0; 256] }
    }

    /// A message with text, cut to what fits.
    pub fn with_text(kind: Kind, a: u64, text: &[u8]) -> Self {
        let mut message = Self::new(kind, a, 0, 0);
        let len = text.len().min(message.text.len());
        message.text[..len].copy_from_slice(&text[..len]);
        message.len = len as u32;
        message
    }

    /// The `Welcome` that carries `settings`.
    pub fn welcome(seat: Option<usize>, settings: &Settings) -> Self {
        Self::with_text(Kind::Welcome, seat.map_or(NONE, |seat| seat as u64), bytes_of(settings))
    }

    /// The `On` that carries the settings of device `number`.
    pub fn on(number: usize, settings: &DeviceSettings) -> Self {
        Self::with_text(Kind::On, number as u64, bytes_of(settings))
    }

    /// The settings in an `On`.
    pub fn device(&self) -> Option<DeviceSettings> {
        self.carried(Kind::On)
    }

    /// The settings in a `Welcome`.
    pub fn settings(&self) -> Option<Settings> {
        self.carried(Kind::Welcome)
    }

    fn carried<T: Plain>(&self, kind: Kind) -> Option<T> {
        (self.kind == kind as u32 && self.len as usize == size_of::<T>() && size_of::<T>() <= self.text.len())
            // SAFETY: so many bytes are there, and any are a valid T.
            .then(|| unsafe { self.text.as_ptr().cast::<T>().read_unaligned() })
    }

    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        bytes_of(self)
    }

    /// The buffer to receive into.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: it is plain: any bytes are valid.
        unsafe { core::slice::from_raw_parts_mut((self as *mut Self).cast(), size_of::<Self>()) }
    }

    /// The text, of a message that has one.
    pub fn text(&self) -> &[u8] {
        &self.text[..(self.len as usize).min(self.text.len())]
    }
}

/// Whoever began the run has said that only memory that asks for huge pages gets them (PR_THP_DISABLE_EXCEPT_ADVISED).
pub const ASKED_HUGE_ONLY: u64 = 1;

/// Processes of any user are served: `/dev/userfaultfd` comes along for those who may not open it.
pub const ANY_USER: u64 = 2;

/// What a keeper must know about the run. Plain integers: it crosses a process border.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Resident memory that all processes of the run may keep together, in bytes; `u64::MAX` = no limit.
    pub limit_bytes: u64,
    /// 0 auto, 1 always, 2 madvise, 3 never.
    pub swapin: u32,
    /// Largest order, 0 to 9.
    pub max_order: u32,
    /// [`ASKED_HUGE_ONLY`], [`ANY_USER`].
    pub flags: u64,
    /// The devices by their numbers; those that have slots have a descriptor, in this order.
    pub device: [DeviceSettings; DEVICES],
}

/// One device of the run.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceSettings {
    /// Higher is used first; equal ones in rotation.
    pub priority: i32,
    /// [`DISCARDS`], [`ROTATIONAL`], [`HEADER`].
    pub flags: u16,
    /// Clusters in each of its trunks: a power of two, up to [`TRUNK_CLUSTERS`].
    pub trunk_clusters: u16,
    /// Pages that the device may grow to; 0: there is none.
    pub slots: u64,
    /// Tells it from all other devices that the run has, had or will have.
    pub serial: u64,
}

const _: () = assert!(size_of::<Settings>() == 24 + 24 * DEVICES && size_of::<Settings>() <= 256);
const _: () = assert!(size_of::<DeviceSettings>() == 24 && size_of::<Message>() == 8 + 24 + 256);
