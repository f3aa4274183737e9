//! The static order: cubes of the latent grid, one cube a block.

/// Extent of a cube along t, h, w: 128 tokens, one block.
pub const CUBE: [usize; 3] = [4, 4, 8];

/// The first `tokens` tokens of a raster-ordered `grid` [t, h, w], cube after cube, raster order inside a cube.
///
/// Cubes at the far faces are cut off where the grid is not a multiple of [`CUBE`]; blocks after such a cube
/// straddle two cubes.
pub(super) fn order(grid: [usize; 3], tokens: usize) -> Vec<u32> {
    let [t, h, w] = grid;
    let [ct, ch, cw] = CUBE;
    let mut order = Vec::with_capacity(tokens);
    for t0 in (0..t).step_by(ct) {
        for h0 in (0..h).step_by(ch) {
            for w0 in (0..w).step_by(cw) {
                for ti in t0..t.min(t0 + ct) {
                    for hi in h0..h.min(h0 + ch) {
                        let row = (ti * h + hi) * w;
                        let inside = (row + w0..row + w.min(w0 + cw)).filter(|&token| token < tokens);
                        order.extend(inside.map(|token| token as u32));
                    }
                }
            }
        }
    }
    order
}
