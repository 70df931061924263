//! What processes had out when they forked, kept for their children. See `pageout::swap::heir`.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fs::File;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pageout::swap::heir::AREAS_AT;

use crate::sys::{self, Mapping};
use crate::tree::Process;
use crate::trunks::Trunk;

/// How long a fork's child may take to ask for what it inherits.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often those are looked at that are to inherit: who was killed before does not come.
const LOOK_EACH: Duration = Duration::from_secs(1);
/// After so many looks in vain nobody is there.
const IN_VAIN: u32 = 5;
/// Who finds one due for so long did not run meanwhile (Ctrl-Z), nor did the child: its time begins anew.
const LATE: Duration = Duration::from_secs(1);

/// What a process had out when it forked; gone with the last who inherited, by whatever generations.
#[derive(Debug)]
pub struct Bequest {
    file: File,
    /// The trunks that it may read from.
    trunks: RefCell<HashSet<Trunk>>,
    /// The devices that it reads from, by their numbers, with those of `_before`.
    devices: u64,
    /// What the parent had inherited itself.
    _before: Vec<Rc<Bequest>>,
}

impl Bequest {
    /// What the child maps.
    pub fn file(&self) -> &File {
        &self.file
    }
}

/// One whose heir has not come yet.
#[derive(Debug)]
struct Waiting {
    number: u64,
    /// Who forks.
    parent: u64,
    bequest: Rc<Bequest>,
    /// How long it may take.
    until: Instant,
    /// Who it is, if that is known, and when to look at it next.
    heir: Option<(Process, Instant)>,
    /// In ticks, as processes have it: the child began later.
    since: u64,
    /// Its parent has ended without a word of it.
    orphan: Option<Orphan>,
}

/// A child that may be there or not.
#[derive(Debug)]
struct Orphan {
    /// When the parent had ended, in ticks: it began before.
    ended: u64,
    look_at: Instant,
    /// Looks since nobody is there who could be it. One alone may miss it: /proc is not read at one moment.
    in_vain: u32,
}

impl Waiting {
    /// When to do something about it.
    fn due(&self) -> Instant {
        let looks = [
            self.heir.as_ref().map(|(_, look_at)| *look_at),
            self.orphan.as_ref().map(|orphan| orphan.look_at),
        ];
        looks.into_iter().flatten().chain([self.until]).min().expect("one at least")
    }

    /// May it still come?
    fn is_awaited(&mut self, now: Instant) -> bool {
        if let Some((heir, look_at)) = self.heir.as_mut().filter(|(_, look_at)| *look_at <= now) {
            *look_at = now + LOOK_EACH;
            if heir.has_ended() {
                return false;
            }
            // It may be stopped, or traced.
            self.until = now + PATIENCE;
        }
        if self.until + LATE < now {
            self.until = now + PATIENCE;
        }
        self.until > now
    }
}

/// All bequests of a run.
#[derive(Debug, Default)]
pub struct Bequests {
    waiting: Vec<Waiting>,
    /// All whose heirs have not all gone, and the pages where their parents are told when they have. That is said by
    /// [`Bequests::release`] and not when one is dropped: we may end before those who read from it.
    alive: Vec<(Weak<Bequest>, Mapping)>,
    /// Trunks that nobody has, but which heirs read from.
    orphans: Vec<Trunk>,
}

impl Bequests {
    /// Keeps one for a child that is about to be, or was born since these ticks: `file`, of the client `parent`, that has `trunks`
    /// and `inherited`.
    pub fn keep(
        &mut self,
        number: u64,
        (parent, since): (u64, u64),
        file: OwnedFd,
        trunks: &[Trunk],
        inherited: &[Rc<Bequest>],
    ) -> Result<()> {
        let file = File::from(file);
        sys::ensure_length(&file, AREAS_AT as u64).context("a bequest")?;
        let first_page = Mapping::of(&file, AREAS_AT)?;
        let own = trunks.iter().map(|(device, _)| 1 << device);
        let devices =
            own.chain(inherited.iter().map(|bequest| bequest.devices)).fold(0, |all, some| all | some);
        let bequest = Rc::new(Bequest {
            file,
            trunks: RefCell::new(trunks.iter().copied().collect()),
            devices,
            _before: inherited.to_vec(),
        });
        self.alive.push((Rc::downgrade(&bequest), first_page));
        let until = Instant::now() + PATIENCE;
        self.waiting.push(Waiting { number, parent, bequest, until, heir: None, since, orphan: None });
        Ok(())
    }

    /// The child is there; it may have come before.
    pub fn is_born(&mut self, number: u64, heir: Process) {
        if let Some(waiting) = self.waiting.iter_mut().find(|waiting| waiting.number == number) {
            waiting.heir = Some((heir, Instant::now() + LOOK_EACH));
            waiting.orphan = None;
        }
    }

    /// It has ended, or executed another program: of a child that it has not told of nobody knows whether there is one.
    pub fn parent_ended(&mut self, parent: u64) {
        let (ended, look_at) = (sys::ticks(), Instant::now());
        let is_its = |waiting: &&mut Waiting| waiting.parent == parent && waiting.heir.is_none();
        for waiting in self.waiting.iter_mut().filter(is_its) {
            waiting.orphan.get_or_insert(Orphan { ended, look_at, in_vain: 0 });
        }
    }

    /// Looks for those whose parents have ended, when it is time; who is nobody is not waited for. `begun_in`: whether there may
    /// be a process that began in these ticks. It need not be the child; whether it has a keeper, or seems to be without one,
    /// says nothing: it may be frozen on the way to what it inherits.
    pub fn seek(&mut self, mut begun_in: impl FnMut(RangeInclusive<u64>) -> bool) {
        let now = Instant::now();
        self.waiting.retain_mut(|waiting| {
            let Some(orphan) = waiting.orphan.as_mut().filter(|orphan| orphan.look_at <= now) else {
                return true;
            };
            let some = begun_in(waiting.since.saturating_sub(1)..=orphan.ended + 1);
            orphan.in_vain = if some { 0 } else { orphan.in_vain + 1 };
            orphan.look_at = now + LOOK_EACH;
            orphan.in_vain < IN_VAIN
        });
    }

    /// There is no child after all, or no more.
    pub fn cancel(&mut self, number: u64) {
        self.waiting.retain(|waiting| waiting.number != number);
    }

    /// The child has come.
    pub fn inherit(&mut self, number: u64) -> Option<Rc<Bequest>> {
        let heir = self.waiting.iter().position(|waiting| waiting.number == number)?;
        Some(self.waiting.swap_remove(heir).bequest)
    }

    /// How many files are open for them.
    pub fn files(&self) -> usize {
        self.alive.len()
    }

    /// No child comes any more.
    pub fn close(&mut self) {
        self.waiting.clear();
    }

    /// How many children still have to come.
    pub fn awaited(&self) -> usize {
        self.waiting.len()
    }

    /// Does one have to come for something on this device?
    pub fn is_awaited_on(&self, device: usize) -> bool {
        self.waiting.iter().any(|waiting| waiting.bequest.devices & 1 << device != 0)
    }

    /// Until one is perhaps not waited for any longer, which [`Bequests::release`] sees to.
    pub fn due_in(&self) -> Option<Duration> {
        let due = self.waiting.iter().map(Waiting::due).min()?;
        Some(due.saturating_duration_since(Instant::now()))
    }

    /// Tells the parents of those who have all gone. Of trunks that their process has no more, those that are free. The
    /// others are once nobody reads from them.
    pub fn release(&mut self, trunks: impl IntoIterator<Item = Trunk>) -> Vec<Trunk> {
        let now = Instant::now();
        self.waiting.retain_mut(|waiting| waiting.is_awaited(now));
        let before = self.alive.len();
        self.alive.retain(|(bequest, first_page)| {
            let has_heirs = bequest.strong_count() > 0;
            if !has_heirs {
                first_page.bequest().released.store(1, Relaxed);
            }
            has_heirs
        });
        // There may be very many, and they are as they were unless a reader has gone.
        let any_gone = self.alive.len() < before;
        let orphans = if any_gone { std::mem::take(&mut self.orphans) } else { Vec::new() };
        let alive = self.alive();
        let is_read = |trunk: &Trunk| alive.iter().any(|bequest| bequest.trunks.borrow().contains(trunk));
        let (read, free): (Vec<Trunk>, _) = orphans.into_iter().chain(trunks).partition(is_read);
        self.orphans.extend(read);
        free
    }

    /// A process has given back trunks: it has counted that no heir reads from them.
    pub fn forget(&mut self, trunks: &[Trunk]) {
        for bequest in self.alive() {
            let mut read = bequest.trunks.borrow_mut();
            trunks.iter().for_each(|trunk| _ = read.remove(trunk));
        }
    }

    /// The orphans of a device that goes: nobody reads from it any more, and another may get its number.
    pub fn give_up(&mut self, device: usize) -> Vec<Trunk> {
        for bequest in self.alive() {
            bequest.trunks.borrow_mut().retain(|(of, _)| *of != device);
        }
        let all = std::mem::take(&mut self.orphans);
        let (gone, kept) = all.into_iter().partition(|(of, _)| *of == device);
        self.orphans = kept;
        gone
    }

    /// Those from which somebody reads, or may.
    fn alive(&self) -> Vec<Rc<Bequest>> {
        self.alive.iter().filter_map(|(bequest, _)| bequest.upgrade()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageout::swap::heir::Bequest as Page;

    fn file() -> (OwnedFd, Mapping) {
        let file = sys::memfd(c"test", AREAS_AT as u64, true).unwrap();
        let mapping = Mapping::of(&file, size_of::<Page>()).unwrap();
        (file.into(), mapping)
    }

    fn released(mapping: &Mapping) -> bool {
        mapping.bequest().released.load(Relaxed) != 0
    }

    #[test]
    fn trunks_are_kept_until_the_last_heir_has_gone() {
        let mut bequests = Bequests::default();
        let ((first, first_page), (second, second_page)) = (file(), file());
        bequests.keep(1, (5, 0), first, &[(0, 3), (1, 4)], &[]).unwrap();
        assert_eq!(bequests.awaited(), 1);
        let child = bequests.inherit(1).unwrap();
        assert!(bequests.inherit(1).is_none() && bequests.awaited() == 0);
        // The child forks too, and its child outlives it; the parent has gone before.
        assert_eq!(bequests.release([(0, 3), (1, 4), (0, 9)]), [(0, 9)]);
        bequests.keep(2, (5, 0), second, &[(0, 5)], std::slice::from_ref(&child)).unwrap();
        let grandchild = bequests.inherit(2).unwrap();
        drop(child);
        assert_eq!(bequests.release([(0, 5)]), []);
        assert!(!released(&first_page) && !released(&second_page));
        drop(grandchild);
        assert!(!released(&first_page) && !released(&second_page), "if we end now they still read");
        assert_eq!(bequests.release([]), [(0, 3), (1, 4), (0, 5)]);
        assert!(released(&first_page) && released(&second_page));
    }

    #[test]
    fn a_trunk_that_was_given_back_is_free_whoever_has_it_next() {
        let mut bequests = Bequests::default();
        bequests.keep(1, (5, 0), file().0, &[(0, 3), (0, 4)], &[]).unwrap();
        let _child = bequests.inherit(1).unwrap();
        bequests.forget(&[(0, 3)]);
        assert_eq!(bequests.release([(0, 3), (0, 4)]), [(0, 3)]);
    }

    #[test]
    fn many_trunks_are_looked_through_once() {
        const MANY: u64 = 16 << 10;
        let trunks = |device| (0..MANY).map(move |trunk| (device, trunk)).collect::<Vec<Trunk>>();
        let mut bequests = Bequests::default();
        let keep = |bequests: &mut Bequests, device| {
            bequests.keep(1, (5, 0), file().0, &trunks(device), &[]).unwrap();
            bequests.inherit(1).unwrap()
        };
        let heirs: Vec<_> = (0..8).map(|_| keep(&mut bequests, 0)).collect();
        let begun = Instant::now();
        assert_eq!(bequests.release(trunks(1)), trunks(1));
        assert_eq!(bequests.release(trunks(0)), []);
        // Whatever happens then.
        (0..1000).for_each(|_| assert_eq!(bequests.release([]), []));
        drop(heirs);
        assert_eq!(bequests.release([]), trunks(0));
        let heir = keep(&mut bequests, 2);
        bequests.forget(&trunks(2));
        assert_eq!(bequests.release(trunks(2)), trunks(2));
        drop(heir);
        // Each by each they are two thousand millions.
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(5), "{took:?}");
    }

    #[test]
    fn what_is_on_another_device_of_the_same_number_is_nobodys() {
        let mut bequests = Bequests::default();
        bequests.keep(1, (5, 0), file().0, &[(0, 3), (1, 3)], &[]).unwrap();
        let _child = bequests.inherit(1).unwrap();
        assert_eq!(bequests.release([(0, 3), (1, 3)]), []);
        assert_eq!(bequests.give_up(0), [(0, 3)]);
        // Another device has come, and one that used it has gone.
        assert_eq!(bequests.release([(0, 3)]), [(0, 3)]);
        assert_eq!(bequests.give_up(1), [(1, 3)]);
    }

    #[test]
    fn a_fork_that_failed_leaves_nothing() {
        let mut bequests = Bequests::default();
        let (file, page) = file();
        bequests.keep(7, (5, 0), file, &[(0, 1)], &[]).unwrap();
        bequests.cancel(7);
        assert!(bequests.inherit(7).is_none());
        assert_eq!(bequests.release([(0, 1)]), [(0, 1)]);
        assert!(released(&page));
    }

    #[test]
    fn nobody_waits_for_ever_nor_for_what_is_elsewhere() {
        let mut bequests = Bequests::default();
        assert_eq!(bequests.due_in(), None);
        bequests.keep(1, (5, 0), file().0, &[(0, 3)], &[]).unwrap();
        let child = bequests.inherit(1).unwrap();
        bequests.keep(2, (5, 0), file().0, &[(2, 1)], &[child]).unwrap();
        assert_eq!([0, 1, 2].map(|device| bequests.is_awaited_on(device)), [true, false, true]);
        assert!(bequests.due_in().is_some_and(|due| due > PATIENCE / 2));
        bequests.waiting[0].until = Instant::now();
        assert_eq!(bequests.due_in(), Some(Duration::ZERO));
        assert_eq!(bequests.release([(2, 1)]), [(2, 1)]);
        assert!(bequests.due_in().is_none() && bequests.awaited() == 0);
    }

    #[test]
    fn who_was_killed_before_it_came_is_not_waited_for() {
        let mut bequests = Bequests::default();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let (file, page) = file();
        bequests.keep(1, (5, 0), file, &[(0, 3)], &[]).unwrap();
        bequests.is_born(1, Process::of(child.id() as i32).unwrap());
        bequests.is_born(2, Process::of(child.id() as i32).unwrap());
        assert!(bequests.due_in().is_some_and(|due| due > LOOK_EACH / 2 && due <= LOOK_EACH));
        let look = |bequests: &mut Bequests| {
            bequests.waiting[0].heir.as_mut().unwrap().1 = Instant::now();
            assert_eq!(bequests.due_in(), Some(Duration::ZERO));
            bequests.release([])
        };
        look(&mut bequests);
        assert!(bequests.awaited() > 0 && !released(&page), "it lives");
        child.kill().unwrap();
        child.wait().unwrap();
        look(&mut bequests);
        assert!(bequests.awaited() == 0 && released(&page), "it was killed");
    }

    #[test]
    fn a_child_that_nobody_can_be_is_not_waited_for() {
        let mut bequests = Bequests::default();
        let (file, page) = file();
        let before = sys::ticks();
        bequests.keep(1, (5, before), file, &[(0, 3)], &[]).unwrap();
        bequests.parent_ended(6);
        bequests.seek(|_| panic!("its parent lives"));
        bequests.parent_ended(5);
        let after = sys::ticks();
        let mut look = |some, over: bool| {
            bequests.waiting[0].orphan.as_mut().unwrap().look_at = Instant::now();
            assert_eq!(bequests.due_in(), Some(Duration::ZERO));
            bequests.parent_ended(5);
            bequests.seek(|begun| {
                assert!(begun.contains(&before) && begun.contains(&after) && !begun.contains(&(after + 2)));
                some
            });
            bequests.seek(|_| panic!("not before it is time"));
            bequests.release([]);
            assert_eq!((bequests.awaited() == 0, released(&page)), (over, over));
        };
        (1..IN_VAIN).for_each(|_| look(false, false));
        look(true, false);
        (1..IN_VAIN).for_each(|_| look(false, false));
        look(false, true);
    }

    #[test]
    fn a_file_that_could_be_cut_is_refused() {
        let file = sys::memfd(c"test", AREAS_AT as u64, false).unwrap();
        assert!(Bequests::default().keep(1, (5, 0), file.into(), &[], &[]).is_err());
    }

    #[test]
    fn the_time_that_nobody_ran_does_not_count() {
        let mut bequests = Bequests::default();
        bequests.keep(1, (5, 0), file().0, &[(0, 3)], &[]).unwrap();
        let age = |bequests: &mut Bequests, by| bequests.waiting[0].until -= PATIENCE + by;
        age(&mut bequests, LATE * 2);
        bequests.release([]);
        assert!(bequests.awaited() > 0, "found late");
        age(&mut bequests, LATE / 4);
        bequests.release([]);
        assert!(bequests.awaited() == 0, "found in time");
    }
}
