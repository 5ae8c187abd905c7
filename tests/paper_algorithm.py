r"""Algorithm 1 (NUCLR) written from the text of the paper alone: a slow float64 reference.

Source: /work/shared/paper/paper.tex; "l. 363" below is a line of that file.  Written without
sight of any other implementation.  Loops are spelled as the formulas are.  The author's own checks (finite
differences, expectation over all batches, Theorem 2) are not part of this copy.

NOTATION, one anchor side.  Anchors x_i, contrasted data y_j, both indexed by the pair i in [n].
  e_ij                = exp((E(x_i,y_j) - E(x_i,y_i) - zeta^(j)) / tau), note e_ii = eps(zeta^(i))
  eps(zeta^(i))       = exp(-zeta^(i)/tau)                                               (l. 350)
  phi_i(w,zeta)       = sum_{j != i} e_ij                                                (l. 350)
  phi_i(w,zeta;B)     = (n-1)/(B-1) sum_{j in B\{i}} e_ij                                (l. 359)
  Phi_t(zeta)         = 1/n sum_i tau log(eps(zeta^(i)) + phi_i(w_t,zeta)) + 1/n sum_j zeta^(j)
  Psi_t(w)            = 1/n sum_i tau log(eps(zeta_t^(i)) + phi_i(w,zeta_t))             (l. 352)
  h_i                 = eps + phi_i (full), P_ij = e_ij / h_i, so that sum_j P_ij = 1.
The second side is the same with E transposed: anchor y_i, contrasted x_j.  zeta^(j) belongs to the
CONTRASTED item (l. 259, 910: "popularity of y_j"), u^(i) to the anchor.  So sides[0] (image
anchors) holds u of the images and zeta of the TEXTS; sides[1] (text anchors) holds u of the texts
and zeta of the IMAGES.

(1) GRADIENT OF ZETA, l. 363 (eq. mavg_stoc_grad_zeta), for j in B_t:
      "G(\zeta_t^{(j)})\coloneqq  \frac{1}{B}\sum_{i\in \B_t} \frac{\tau}{\varepsilon_t^{(i)} +
       u_{t+1}^{(i)}} \frac{\partial}{\partial \zeta^{(j)}}(\varepsilon_t^{(i)} +
       \phi_i(\w_t;\boldsymbol{\zeta}_t;\B_t))  + \frac{1}{n},\quad j\in\B_t"
    eps_t^(i) = eps(zeta_t^(i)) (l. 359 "$\varepsilon(\zeta_t^{(i)})$ is shortened to
    $\varepsilon_t^{(i)}$"); the derivative is
      d eps^(i)/d zeta^(j) = -[i=j] eps_t^(j)/tau            (from l. 350; not printed)
      d phi_i(B)/d zeta^(j) = -[i!=j] (n-1)/((B-1) tau) e_ij (l. 901)
    Both are there.  The constant is + 1/n as printed.  (l. 901, which prices the gradient, lists
    only the derivative of phi; l. 363 governs.)  xi does NOT enter: l. 368 reduces eps
    "in \eqref{eq:mavg_stoc_grad_w}" only.
    1/n OR 1/B?  Let G_j := 0 for j outside B (these zeta do not move, l. 379) and let B be
    uniform without replacement.  With the denominators held at any fixed value the expectation of
    the data term is exactly the full data term, because P(i,j in B) = B(B-1)/(n(n-1)) meets
    1/B * (n-1)/(B-1), and P(j in B) = B/n meets 1/B for i=j.  The constant has the expectation
    (B/n) * (1/n) = B/n^2, not 1/n.  So the printed +1/n on j in B only is NOT part of an unbiased
    estimate of grad Phi_t; unbiased would be +1/B on j in B, or +1/n on ALL j of [n].  As a
    formula, the printed line is the j-th partial derivative of
      1/B sum_{i in B} tau log(eps + phi_i(B)) + 1/n sum_{j in [n]} zeta^(j)
    whose partial derivative at j outside B is +1/n and is dropped by the algorithm.
    Consequence: sum_{j in B} G_j = -1 + B/n (when u = phi(B)), so the visited zeta rise on average
    by eta (1/B - 1/n) per visit for ever: Phi_t with weight B/n on its linear term has no
    minimizer.  In expectation the error is a multiple of the vector 1_n, the flat direction of
    Phi_t (Theorem 2), so the differences zeta^(j)-zeta^(k) are driven as they should be; what
    drifts is the mean, and with it xi and (late) u.  `constant="1/B"` gives the unbiased form for
    comparison, the default is the printed one.

(2) WHICH u.  l. 359: "update $u_{t+1}^{(i)} =(1-\gamma)u_t^{(i)} + \gamma
    \phi_i(\w_t,\boldsymbol{\zeta}_t;\B_t)$ for those $i\in\B_t$", l. 360 unchanged for the others;
    u_{t+1} is in the denominator of both G(zeta_t) (l. 363) and G(w_t) (l. 364).  The update is no
    line of Algorithm 1; it must precede l. 377, which needs u_{t+1}.  One u per anchor, updated
    once per step, and always with phi at zeta_t.

(3) WHICH zeta IN G(w_t).  zeta_t, the OLD one, although l. 380 follows the zeta update (l. 378):
    l. 364 has "\nabla_\w \phi_i(\w_t, \boldsymbol{\zeta}_t;\B_t)"; l. 342 "Jacobi-type
    alternating minimization"; l. 346 "we fix the auxiliary variable ... to $\boldsymbol{\zeta}_t$".
      G(w_t) = 1/B sum_{i in B} tau/(eps_t^(i) + u_{t+1}^(i)) grad_w phi_i(w_t,zeta_t;B)  (l. 364)
    d phi_i(B)/dE_ib = (n-1)/((B-1) tau) e_ib (b != i), d phi_i(B)/dE_ii = -phi_i(B)/tau.

(4) xi.  l. 368: "\xi_t=\max\{\xi_{t-1},\Norm{\boldsymbol{\zeta}_t}_\infty\}$ and reduce
    $\varepsilon_t^{(i)}$ in \eqref{eq:mavg_stoc_grad_w} of positive pair ... to
    $\exp(-\xi_t/\tau)$": in G(w_t), and there only, eps_t^(i) = exp(-xi_t/tau).
    l. 381, last in the loop: "\xi_{t+1} = \max\{\xi_t,\|\boldsymbol{\zeta}_{t+1}\|_\infty\}".
    So G(w_t) sees xi_t, which knows zeta_t but not zeta_{t+1}; at t=0 it sees xi_0 as given.
    The norm is max_j |zeta^(j)| (absolute value) over all n entries, visited or not.
    xi is updated also when zeta is frozen (l. 439 removes "step alg:step_zeta" alone).

(5) u_0: l. 374 "Initialize $\w_0$, $\u_0$", no value.  Here u_{t+1}^(i) = phi_i(w_t,zeta_t;B_t)
    at the first visit of i (the limit of gamma=1), then l. 359.

(6) SGDm: l. 378 "(or a momentum/adaptive method)", l. 392 "update $\boldsymbol{\zeta}$ by the SGDm
    optimizer", nothing more.  momentum_form="ema": v <- beta v + (1-beta) G;  "heavy_ball":
    v <- beta v + G;  then zeta <- zeta - eta v; v_0 = 0.  ema at eta is heavy_ball at (1-beta) eta.
    For j outside B neither zeta (l. 379) nor v moves (lazy).

(7) Freezing (l. 392, first 5 epochs) and the cosine schedule are the caller's: step(...,
    move_zeta=, eta_zeta=).  Frozen: zeta and v stand still, u and xi go on.

SYMMETRY.  l. 240-242 sums both sides, no factor 1/2: dL_dE = G_x + G_y^T.

VALUE.  No value estimate is printed.  Returned: Psi_t of l. 352 with the mean over [n] replaced by
the mean over B and phi_i by u_{t+1}^(i) (what u is for, l. 359), with eps = eps(zeta_t^(i)) as l. 352
has it: sum over both sides of 1/B sum_{i in B} tau log(eps(zeta_t^(i)) + u_{t+1}^(i)).  The other
readings (eps of xi, phi(B) instead of u, + the zeta term) are in `last[s]["value_..."]`.
"""

# ruff: noqa: SIM108, C408
import numpy as np


class Side:
    """State of one anchor side: u of the anchors, zeta of the contrasted items, xi."""

    def __init__(self, n, zeta_0, xi_0):
        self.u = np.zeros(n)  # u^(i); meaningless until seen[i]
        self.seen = np.zeros(n, dtype=bool)
        self.zeta = np.zeros(n) + np.asarray(zeta_0, dtype=np.float64)  # l. 367, 374
        self.v = np.zeros(n)  # momentum buffer of zeta
        self.xi = float(xi_0)


class PaperNuclr:
    """Algorithm 1; see the module docstring for every choice.

    zeta_0: scalar (l. 367) or (n,).  momentum: beta of SGDm, 0 is plain SGD.
    momentum_form: "ema" or "heavy_ball".  constant: "1/n" (printed) or "1/B" (unbiased).
    use_xi=False: eps of G(w_t) is eps(zeta_t^(i)) (the variant NUCLR-diamond, l. 439).
    """

    def __init__(
        self, n, tau, gamma, eta_zeta, zeta_0, xi_0, momentum=0.0, momentum_form="ema", constant="1/n", use_xi=True
    ):
        assert momentum_form in ("ema", "heavy_ball") and constant in ("1/n", "1/B")
        assert np.all(xi_0 >= np.asarray(zeta_0)), "l. 374: xi_0 >= zeta_0"
        self.n, self.tau, self.gamma, self.eta_zeta = int(n), float(tau), float(gamma), eta_zeta
        self.momentum, self.momentum_form = momentum, momentum_form
        self.constant, self.use_xi = constant, use_xi
        self.sides = [Side(n, zeta_0, xi_0), Side(n, zeta_0, xi_0)]
        self.last = [{}, {}]

    def step(self, E, batch, move_zeta=True, eta_zeta=None):
        """One iteration t.  E[a,b] = E_{w_t}(x_{batch[a]}, y_{batch[b]}).  Returns (value, dL_dE)."""
        E = np.asarray(E, dtype=np.float64)
        batch = [int(i) for i in batch]
        assert E.shape == (len(batch), len(batch)) and len(batch) >= 2
        assert len(set(batch)) == len(batch), "B_t is a subset of [n] (l. 376)"
        eta = self.eta_zeta if eta_zeta is None else eta_zeta
        vx, gx = self._step_side(0, E, batch, move_zeta, eta)
        vy, gy = self._step_side(1, E.T, batch, move_zeta, eta)
        return vx + vy, gx + gy.T  # l. 242

    def _step_side(self, s, E, batch, move_zeta, eta):
        S, n, tau, B = self.sides[s], self.n, self.tau, len(batch)

        # e[a][b] = exp((E_ab - E_aa - zeta_t^(b))/tau); phi_i(w_t, zeta_t; B_t), l. 359
        e = np.zeros((B, B))
        for a in range(B):
            for b in range(B):
                e[a, b] = np.exp((E[a, b] - E[a, a] - S.zeta[batch[b]]) / tau)
        phi = np.zeros(B)
        for a in range(B):
            for b in range(B):
                if b != a:
                    phi[a] += (n - 1) / (B - 1) * e[a, b]

        # u_{t+1}, l. 359; first visit: phi
        for a, i in enumerate(batch):
            if not S.seen[i]:
                S.u[i] = phi[a]
                S.seen[i] = True
            else:
                S.u[i] = (1 - self.gamma) * S.u[i] + self.gamma * phi[a]
        u = np.array([S.u[i] for i in batch])

        # G(zeta_t^(j)), l. 363, eps = eps(zeta_t^(i))
        eps = np.array([np.exp(-S.zeta[i] / tau) for i in batch])
        G_zeta = np.zeros(B)
        for b in range(B):  # j = batch[b]
            for a in range(B):  # i = batch[a]
                if a == b:
                    derivative = -eps[b] / tau  # of eps^(i)
                else:
                    derivative = -(n - 1) / ((B - 1) * tau) * e[a, b]  # of phi_i(B), l. 901
                G_zeta[b] += 1 / B * tau / (eps[a] + u[a]) * derivative
            G_zeta[b] += 1 / n if self.constant == "1/n" else 1 / B

        # G(w_t), l. 364, with zeta_t, u_{t+1} and eps = exp(-xi_t/tau), l. 368
        eps_w = np.array([np.exp(-S.xi / tau) for _ in batch]) if self.use_xi else eps
        dL_dE = np.zeros((B, B))
        for a in range(B):
            weight = 1 / B * tau / (eps_w[a] + u[a])
            for b in range(B):
                if b == a:
                    dL_dE[a, a] += weight * (-phi[a] / tau)
                else:
                    dL_dE[a, b] += weight * (n - 1) / ((B - 1) * tau) * e[a, b]

        def mean_tau_log(first, second):
            return sum(tau * np.log(first[a] + second[a]) for a in range(B)) / B

        value = mean_tau_log(eps, u)
        self.last[s] = dict(
            phi=phi,
            u=u.copy(),
            eps=eps,
            eps_w=eps_w,
            G_zeta=G_zeta,
            xi=S.xi,
            zeta=np.array([S.zeta[i] for i in batch]),
            value_zeta_u=value,
            value_xi_u=mean_tau_log(eps_w, u),
            value_zeta_phi=mean_tau_log(eps, phi),
            value_xi_phi=mean_tau_log(eps_w, phi),
            value_Phi_u=value + float(np.mean(S.zeta)),
        )  # l. 352, full zeta mean

        # zeta_{t+1}, l. 378-379
        if move_zeta:
            for b, j in enumerate(batch):
                if self.momentum_form == "ema":
                    S.v[j] = self.momentum * S.v[j] + (1 - self.momentum) * G_zeta[b]
                else:
                    S.v[j] = self.momentum * S.v[j] + G_zeta[b]
                S.zeta[j] = S.zeta[j] - eta * S.v[j]

        # xi_{t+1}, l. 381: all n entries, absolute value
        S.xi = max(S.xi, max(abs(S.zeta[j]) for j in range(n)))
        return value, dL_dE
