//! The profiles and filters of a shard in an image of a stack. In the image the profiles in use are numbered
//! without gaps, after those that follow from the configuration. The filters are numbered without gaps, too.

use super::{FilterId, Profile, ProfileId, ProfileTable, USUAL};
use crate::socket_filter::SocketFilter;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The table.
#[derive(Serialize, Deserialize)]
#[serde(rename = "ProfileTable")]
pub(crate) struct ProfilesImage {
    profiles: Vec<Profile>,
    filters: Vec<Vec<u8>>,
}

/// The numbers that profiles have in an image.
pub(crate) struct ProfileNumbers(Vec<u16>);

impl ProfileNumbers {
    /// Returns the number of a profile.
    pub fn number(&self, id: ProfileId) -> u16 {
        self.0[usize::from(id.0)]
    }
}

/// The profiles of an image by their numbers. Each counts as used until the image is restored.
pub(crate) struct RestoredProfiles(Vec<ProfileId>);

impl RestoredProfiles {
    /// Returns the profile with a number.
    ///
    /// # Errors
    /// There is none.
    pub fn get(&self, number: u16) -> Result<ProfileId, &'static str> {
        self.0.get(usize::from(number)).copied().ok_or("a socket has a profile that does not exist")
    }
}

impl ProfileTable {
    /// Returns the image, and the numbers of the profiles in it.
    pub(crate) fn image(&self) -> (ProfilesImage, ProfileNumbers) {
        let mut filters = Vec::new();
        let filter_ids: Vec<FilterId> = (self.filters.slots.iter())
            .map(|slot| {
                filters.extend(slot.as_ref().map(|slot| slot.filter.saved()));
                // Cannot truncate: there are at most as many as slots.
                FilterId(filters.len() as u16)
            })
            .collect();
        let filter_in_image = |id: FilterId| match id {
            FilterId::NONE | FilterId::DROP_ALL => id,
            FilterId(number) => filter_ids[usize::from(number) - 1],
        };
        let mut profiles = Vec::new();
        let numbers = (0..).zip(&self.entries).map(|(id, (profile, users))| match id {
            0..USUAL => id,
            _ if *users == 0 => u16::MAX,
            _ => {
                profiles.push(profile.with_filter(filter_in_image(profile.filter)));
                // Cannot truncate: there are at most as many as entries.
                USUAL + (profiles.len() - 1) as u16
            }
        });
        let numbers = ProfileNumbers(numbers.collect());
        (ProfilesImage { profiles, filters }, numbers)
    }

    /// Takes over the profiles of an image, whose filters `make` makes again.
    ///
    /// # Errors
    /// A filter was not made, or the image is malformed.
    pub(crate) fn restore(
        &mut self,
        image: ProfilesImage,
        mut make: impl FnMut(&[u8]) -> Option<Arc<dyn SocketFilter>>,
    ) -> Result<RestoredProfiles, &'static str> {
        let mut filters = Vec::new();
        for saved in image.filters {
            let filter = make(&saved).ok_or("the filter of a socket was not made again")?;
            filters.push(self.filters.add(filter).ok_or("there are too many filters")?);
        }
        let mut restored: Vec<ProfileId> = (0..USUAL).map(ProfileId).collect();
        for profile in image.profiles {
            let filter = match profile.filter {
                id @ (FilterId::NONE | FilterId::DROP_ALL) => id,
                FilterId(number) => *filters
                    .get(usize::from(number) - 1)
                    .ok_or("a profile has a filter that does not exist")?,
            };
            let id = self.intern(profile.with_filter(filter)).ok_or("there are too many profiles")?;
            restored.push(id);
        }
        Ok(RestoredProfiles(restored))
    }

    /// Ends the use of the profiles by the image.
    pub(crate) fn end_restore(&mut self, restored: RestoredProfiles) {
        restored.0.into_iter().for_each(|id| self.release(id));
    }
}
