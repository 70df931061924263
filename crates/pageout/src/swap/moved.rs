//! What had become of a parent's areas at the moment of a clone.
//!
//! Threads of the parent go on while one of them forks. What they unmap and move after the names were taken may have
//! happened before the clone or after it, and is told later, in either case. So what is managed is marked before
//! ([`Kernel::mark`](crate::kernel::Kernel::mark)): the mark goes where the mapping goes, the child has it too, and what
//! comes to the same addresses has none. Once all events are read, the parent writes down what changed, and the child
//! finds how much of that had happened when it was made: as much as leaves the areas where its marks are.
//!
//! Events that have to do with the same addresses happened in the order in which they were applied, and all that one tells
//! happened at once, also what was applied in parts; others may have happened in any order. What was moved may have grown
//! by its move, over what had been unmapped: the child has it in one mapping with that, marked as it is.

use crate::flaw::{makes, Flaw};
use crate::space::{Change, Region, Regions};
use alloc::vec::Vec;

/// Where the parent's pages are in the child.
pub struct Moved {
    there: Regions,
    marked: Regions,
    keeps: bool,
    groups: Vec<Group>,
}

/// No order of what happened explains the marks, or several do that disagree about a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unexplained;

/// Changes that have to do with each other.
#[derive(Default)]
struct Group {
    /// By when they were applied.
    changes: Vec<(usize, Change)>,
    /// The addresses that they are about.
    touched: Regions,
    /// Which of them may have happened, whatever the marks say.
    possible: Vec<Happened>,
    /// Which had, as far as can be known: more than one if they are alike.
    happened: Vec<Happened>,
}

/// Of each change of a group, whether it had happened.
type Happened = Vec<bool>;

/// Of more events of a group only so many are taken to have happened as were the first to be applied.
const MOST_EVENTS: usize = 8;

impl Moved {
    /// The parent had these `areas`, of which the child has `marked`, wherever they are, of all that is `there`; `changes` is
    /// what happened since, also after the clone. The parent `keeps` some from children (MADV_DONTFORK), or may. It was not
    /// always heard of: what is nowhere, while nothing else has come to be anywhere, is kept too.
    pub fn new(
        areas: &Regions,
        there: Regions,
        mut marked: Regions,
        changes: &[Change],
        keeps: bool,
    ) -> Self {
        let changes = if makes(Flaw::MovesUntold) { &[] } else { changes };
        let mut groups: Vec<Group> = Vec::new();
        for (when, change) in changes.iter().enumerate() {
            let (related, others): (Vec<_>, Vec<_>) =
                groups.into_iter().partition(|group: &Group| group.meets(*change, &marked));
            groups = others;
            groups.push(related.into_iter().fold(Group::of(when, *change, &marked), Group::join));
        }
        for group in &mut groups {
            group.explain(areas, &marked);
        }
        // What nothing has happened to is where it was, also if the program has taken the mark off.
        let mut still = Regions::default();
        for area in areas.iter() {
            there.within(area.start, area.end).for_each(|part| still.insert(part));
        }
        for Region { start, end } in groups.iter().flat_map(|group| group.touched.iter()) {
            still.remove(start, end);
        }
        still.iter().for_each(|part| marked.insert(part));
        let keeps = keeps || !has_strays(areas, &groups, &marked);
        Self { there, marked, keeps, groups }
    }

    /// What the child has of the parent's, as far as it is known, and what else is marked.
    pub fn parents(&self) -> impl Iterator<Item = Region> + '_ {
        self.marked.iter()
    }

    /// Where `page` of the parent's is; `None`: the child does not have it.
    ///
    /// # Errors
    /// That cannot be known.
    pub fn place(&self, page: usize) -> Result<Option<usize>, Unexplained> {
        let Some(group) = self.groups.iter().find(|group| group.touched.find(page).is_some()) else {
            let here = self.marked.find(page).map(|_| page);
            // Nobody told of what became of it: who moved it was killed.
            return if here.is_some() || self.keeps { Ok(here) } else { Err(Unexplained) };
        };
        let is_there = |place: usize| self.there.find(place).is_some();
        if !group.possible.iter().filter_map(|happened| group.place(page, happened)).any(is_there) {
            // Children do not get it, wherever it is (MADV_DONTFORK).
            return Ok(None);
        }
        let mut places = group.happened.iter().map(|happened| group.place(page, happened));
        let place = places.next().ok_or(Unexplained)?;
        if places.any(|other| other != place) {
            return Err(Unexplained);
        }
        Ok(place.filter(|place| self.marked.find(*place).is_some()))
    }
}

/// Is something marked where nothing was, and nothing came by what was told? It may have been moved there. What had grown in
/// place has not.
fn has_strays(areas: &Regions, groups: &[Group], marked: &Regions) -> bool {
    let mut known = Regions::default();
    for Region { start, end } in groups.iter().flat_map(|group| group.touched.iter()).chain(areas.iter()) {
        known.remove(start, end);
        known.insert(Region { start, end });
    }
    let mut stray = false;
    for Region { start, end } in marked.iter() {
        known.gaps(start, end, |from, _| stray |= known.find(from - 1).is_none());
    }
    stray
}

impl Group {
    fn of(when: usize, change: Change, marked: &Regions) -> Self {
        let mut group = Self::default();
        group.changes.push((when, change));
        for (start, end) in reach(change, marked) {
            group.touched.insert(Region { start, end });
        }
        group
    }

    fn meets(&self, change: Change, marked: &Regions) -> bool {
        self.changes.iter().any(|(_, other)| other.event == change.event)
            || reach(change, marked).any(|(start, end)| self.touched.within(start, end).next().is_some())
    }

    fn join(mut self, other: Self) -> Self {
        self.changes.extend(other.changes);
        self.changes.sort_unstable_by_key(|(when, _)| *when);
        other.touched.iter().for_each(|region| self.touched.insert(region));
        self
    }

    /// Finds which had happened. More may be marked than the areas: what they have grown by. So those count that leave
    /// most of the areas there, but for what may be such growth.
    fn explain(&mut self, areas: &Regions, marked: &Regions) {
        let mut before = Regions::default();
        for Region { start, end } in self.touched.iter() {
            areas.within(start, end).for_each(|part| before.insert(part));
        }
        self.possible = self.orders();
        let mut most = 0;
        for happened in &self.possible {
            let mut there = Regions::default();
            before.iter().for_each(|part| there.insert(part));
            let changes = || self.changes.iter().zip(happened).filter(|(_, happened)| **happened);
            changes().for_each(|((_, one), _)| change(&mut there, *one));
            let is_marked = |part: Region| {
                let mut all = true;
                marked.gaps(part.start, part.end, |_, _| all = false);
                all
            };
            if !there.iter().all(is_marked) {
                continue;
            }
            // What one mapping has behind what came to be in it.
            for (start, end) in changes().filter_map(|((_, one), _)| grown(*one, marked)) {
                if there.find(start - 1).is_some() {
                    there.remove(start, end);
                }
            }
            let size: usize = there.iter().map(|part| part.end - part.start).sum();
            if size < most {
                continue;
            }
            if size > most {
                most = size;
                self.happened.clear();
            }
            self.happened.push(happened.clone());
        }
    }

    /// Which changes may have happened together: with each event those that must have happened before.
    fn orders(&self) -> Vec<Happened> {
        let mut events: Vec<u64> = Vec::new();
        let mut number = |event: u64| {
            events.iter().position(|known| *known == event).unwrap_or_else(|| {
                events.push(event);
                events.len() - 1
            })
        };
        // Of each change, which event in the order of the first parts told of it.
        let numbers: Vec<usize> = self.changes.iter().map(|(_, change)| number(change.event)).collect();
        let of = |is: &dyn Fn(usize) -> bool| numbers.iter().map(|event| is(*event)).collect();
        if events.len() > MOST_EVENTS {
            return (0..=events.len()).map(|first| of(&|event| event < first)).collect();
        }
        // Which come before which. Where parts of two came in either order, who was first is.
        let mut before = alloc::vec![0u32; events.len()];
        for (at, (_, one)) in self.changes.iter().enumerate() {
            for (later, (_, other)) in self.changes.iter().enumerate().skip(at + 1) {
                let (first, second) = (numbers[at], numbers[later]);
                if first != second && meet(*one, *other) && before[first] & 1 << second == 0 {
                    before[second] |= 1 << first;
                }
            }
        }
        let is_possible =
            |set: &u32| (0..events.len()).all(|event| set & 1 << event == 0 || before[event] & !set == 0);
        (0..1u32 << events.len()).filter(is_possible).map(|set| of(&|event| set & 1 << event != 0)).collect()
    }

    /// Where a page is when these have happened.
    fn place(&self, page: usize, happened: &Happened) -> Option<usize> {
        let mut at = page;
        for ((_, change), _) in self.changes.iter().zip(happened).filter(|(_, happened)| **happened) {
            let (from, to) = change.sides();
            let is_in = |range: (usize, usize)| (range.0..range.1).contains(&at);
            if is_in(from) {
                at = to?.0 + (at - from.0);
            } else if to.is_some_and(is_in) {
                return None;
            }
        }
        Some(at)
    }
}

/// Do two changes have to do with the same addresses?
fn meet(one: Change, other: Change) -> bool {
    addresses(one).any(|(start, end)| addresses(other).any(|(from, to)| start < to && from < end))
}

/// What the child has in one mapping with what came, behind it: that may have grown by so much.
fn grown(change: Change, marked: &Regions) -> Option<(usize, usize)> {
    let (_, end) = change.sides().1?;
    let mapping = marked.find(end - 1)?;
    (end < mapping.end).then_some((end, mapping.end))
}

/// The addresses that a change is about, and what may have grown by it.
fn reach(change: Change, marked: &Regions) -> impl Iterator<Item = (usize, usize)> {
    addresses(change).chain(grown(change, marked))
}

/// The addresses that a change is about.
pub(super) fn addresses(change: Change) -> impl Iterator<Item = (usize, usize)> {
    let (from, to) = change.sides();
    core::iter::once(from).chain(to)
}

/// The areas after a change.
fn change(areas: &mut Regions, change: Change) {
    let (from, to) = change.sides();
    let moved: Vec<Region> = areas.within(from.0, from.1).collect();
    for (start, end) in addresses(change) {
        areas.remove(start, end);
    }
    for part in moved {
        if let Some(to) = to {
            areas.insert(Region { start: to.0 + (part.start - from.0), end: to.0 + (part.end - from.0) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn gone(from: u64, len: u64) -> Change {
        Change { from, len, to: Change::GONE, event: 0 }
    }

    const fn came(from: u64, len: u64, to: u64) -> Change {
        Change { from, len, to, event: 0 }
    }

    /// Each by an event of its own, but for those that have one.
    fn told(changes: &[Change]) -> Vec<Change> {
        let number = |(at, change): (usize, &Change)| match change.event {
            0 => Change { event: 100 + at as u64, ..*change },
            _ => *change,
        };
        changes.iter().enumerate().map(number).collect()
    }

    fn regions(ranges: &[(usize, usize)]) -> Regions {
        let mut regions = Regions::default();
        ranges.iter().for_each(|(start, end)| regions.insert(Region { start: *start, end: *end }));
        regions
    }

    /// The parent has 10..20 and 40..50; where page 12 of it is in a child that has `marked`, and `more` without a mark.
    fn place_with(
        changes: &[Change],
        marked: &[(usize, usize)],
        more: &[(usize, usize)],
    ) -> Result<Option<usize>, Unexplained> {
        let there = regions(&[marked, more].concat());
        Moved::new(&regions(&[(10, 20), (40, 50)]), there, regions(marked), &told(changes), true).place(12)
    }

    fn place(changes: &[Change], marked: &[(usize, usize)]) -> Result<Option<usize>, Unexplained> {
        place_with(changes, marked, &[])
    }

    #[test]
    fn what_stays_needs_no_mark() {
        assert_eq!(place_with(&[], &[(40, 50)], &[(10, 20)]), Ok(Some(12)));
        assert_eq!(place_with(&[gone(40, 10)], &[], &[(10, 20)]), Ok(Some(12)));
        // It may be another.
        assert_eq!(place_with(&[gone(10, 10)], &[(40, 50)], &[(10, 20)]), Ok(None));
    }

    #[test]
    fn what_children_do_not_get_is_nowhere_wherever_it_goes() {
        assert_eq!(place(&[], &[(40, 50)]), Ok(None));
        assert_eq!(place(&[came(10, 10, 60), gone(10, 10)], &[(40, 50)]), Ok(None));
        // The mark was taken off on the way, or it is another.
        assert_eq!(place_with(&[came(10, 10, 60)], &[(40, 50)], &[(60, 70)]), Err(Unexplained));
    }

    #[test]
    fn what_had_moved_is_at_its_new_place() {
        let both = [came(10, 10, 60), gone(10, 10)];
        assert_eq!(place(&both, &[(10, 20), (40, 50)]), Ok(Some(12)));
        assert_eq!(place(&both, &[(40, 50), (60, 70)]), Ok(Some(62)));
        // It grew on its way.
        assert_eq!(place(&both, &[(40, 50), (60, 75)]), Ok(Some(62)));
        // Others came where it had been, one of them marked.
        let and_more = [both[0], both[1], came(40, 10, 10), came(60, 10, 80)];
        assert_eq!(place(&and_more, &[(10, 20), (60, 70)]), Ok(Some(62)));
        assert_eq!(place(&and_more, &[(10, 20), (80, 90)]), Ok(Some(82)));
        assert_eq!(place(&and_more, &[(40, 50), (60, 70)]), Ok(Some(62)));
    }

    #[test]
    fn what_was_unmapped_is_nowhere_whatever_is_there_now() {
        assert_eq!(place(&[gone(12, 4)], &[(10, 12), (16, 20), (40, 50)]), Ok(None));
        assert_eq!(place(&[gone(12, 4)], &[(10, 20), (40, 50)]), Ok(Some(12)));
        // Moved over.
        let over = [gone(10, 10), came(40, 10, 10), gone(40, 10)];
        assert_eq!(place(&over, &[(10, 20)]), Ok(None));
        assert_eq!(place(&over, &[(10, 20), (40, 50)]), Ok(Some(12)));
    }

    #[test]
    fn what_nobody_can_know_is_not_guessed() {
        // The two change places by a third, all of which may have happened.
        let swapped = [came(10, 10, 60), came(40, 10, 10), came(60, 10, 40)];
        assert_eq!(place(&swapped, &[(10, 20), (40, 50)]), Err(Unexplained));
        // Marks that nothing explains.
        assert_eq!(place_with(&swapped, &[(80, 90)], &[(10, 20), (40, 50)]), Err(Unexplained));
        // Nobody told of what became of it.
        let lost = Moved::new(&regions(&[(10, 20)]), regions(&[]), regions(&[(60, 70)]), &[], false);
        assert_eq!(lost.place(12), Err(Unexplained));
    }

    #[test]
    fn what_grew_over_what_was_unmapped_is_not_that() {
        // 10..20 is unmapped, by one event with more before; 40..42 comes before it, and grows over it.
        let grows = [came(40, 2, 8), gone(40, 2)];
        let by_parts =
            [Change { event: 1, ..gone(8, 2) }, grows[0], Change { event: 1, ..gone(10, 10) }, grows[1]];
        assert_eq!(place(&by_parts, &[(8, 20), (42, 50)]), Ok(None));
        // In the order in which it happened, which the marks do not tell from none.
        let in_order = [gone(10, 10), grows[0], grows[1]];
        assert_eq!(place(&in_order, &[(8, 20), (42, 50)]), Err(Unexplained));
        // Mappings of their own: it has not been unmapped.
        assert_eq!(place(&in_order, &[(8, 10), (10, 20), (42, 50)]), Ok(Some(12)));
        assert_eq!(place(&in_order, &[(8, 10), (42, 50)]), Ok(None));
    }

    #[test]
    fn what_is_nowhere_while_nothing_strays_was_kept() {
        let areas = regions(&[(10, 20), (40, 50)]);
        let place = |marked: &[(usize, usize)], changes: &[Change]| {
            Moved::new(&areas, regions(marked), regions(marked), &told(changes), false).place(12)
        };
        assert_eq!(place(&[(40, 50)], &[]), Ok(None));
        // Another area grew in place, or was moved.
        assert_eq!(place(&[(40, 55)], &[]), Ok(None));
        assert_eq!(place(&[(60, 70)], &[came(40, 10, 60)]), Ok(None));
        assert_eq!(place(&[(40, 50), (60, 61)], &[]), Err(Unexplained));
    }
}
