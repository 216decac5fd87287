//! Expert-locality signatures and maps: transforms, rho, layer mask, balanced K-means.
