"""Algorithm 1 (NUCLR), written from the text of the paper alone in float64 loops, without sight of other code.

"l. 363" is a line of the paper's LaTeX source. One anchor side has u of its anchors, and zeta and xi of the contrasted
items; the second side is the same with E transposed, and both are summed without a factor (l. 242).

    e_ij       = exp((E_ij - E_ii - zeta_j)/tau),  eps_i = exp(-zeta_i/tau)
    phi_i(B)   = (n-1)/(B-1) sum_{j != i in B} e_ij                                   (l. 359)
    u_{t+1}    = (1 - gamma) u_t + gamma phi(B); phi at the first visit (u_0 has no value in the text)
    G(zeta_j)  = 1/B sum_i tau/(eps_i + u_{t+1,i}) d(eps_i + phi_i(B))/dzeta_j + 1/n    (l. 363); xi does not enter
    G(w)       = 1/B sum_i tau/(exp(-xi_t/tau) + u_{t+1,i}) grad phi_i(B), at zeta_t     (l. 364, 368)
    xi_{t+1}   = max(xi_t, max_j |zeta_{t+1,j}|) over all n, last in the loop             (l. 381)

The constant is + 1/n as printed. Only j in B moves, so its expectation is B/n^2 instead of 1/n; 1/B would be unbiased
(`constant="1/B"`). The difference is the same for all j: the direction that Theorem 2 leaves free. SGDm is not
specified: v <- beta v + (1-beta) G ("ema") or v <- beta v + G ("heavy_ball"), v_0 = 0, for j in B only. Freezing and
schedules are the caller's. The value is the mean over the batch of tau log(eps_i + u_{t+1,i}), summed over the sides.
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
