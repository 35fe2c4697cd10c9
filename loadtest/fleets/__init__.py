"""Mock fleets under real load: scenarios, recorded traffic, other load generators, and the records of all of these."""
