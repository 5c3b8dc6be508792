package lease

import (
	"testing"
	"time"
)

// Any sequence of requests, heartbeats, expiries and resets, against the four guarantees.
func FuzzLease(f *testing.F) {
	for _, seed := range []string{"t0t1r", "t0rt1", "t0et0", "t0wwwwct0", "rx t0", "", "t0t0t0c0c1", "t0vt0rt0"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, moves []byte) {
		l, now := New(1), time.Unix(0, 0)
		holder, expires, spoilt := byte(0), now, false // 0 for nobody
		for at := 0; at < len(moves); at++ {
			arg := byte('0')
			if at+1 < len(moves) && moves[at+1] != 0 {
				arg = moves[at+1]
			}
			request := Request{Owner: string(arg), Token: "token" + string(arg), TTL: 3 * time.Second}
			before := l.See(now)
			switch moves[at] {
			case 't':
				renewed, err := l.Take(now, request)
				switch {
				case err == nil && before.State == Dirty:
					t.Fatal("a dirty sandbox was given away")
				case err == nil && renewed != (holder == arg):
					t.Fatalf("renewed %v, held by %q, asked by %q", renewed, holder, arg)
				case err == nil && holder != 0 && holder != arg:
					t.Fatal("two owners")
				case err == nil:
					holder, expires = arg, now.Add(request.TTL)
				case before.State == Free:
					t.Fatal("a free sandbox was refused: ", err)
				}
				at++
			case 'w':
				now = now.Add(time.Second)
			case 'v':
				l.Revoke()
				holder = 0
			case 'r', 'x': // a clean reset, and one that finds something
				l.Revoke()
				residue := map[byte]string{'x': "something"}[moves[at]]
				spoilt = spoilt || residue != ""
				l.Cleaned(residue)
				holder = 0
			}
			if holder != 0 && !now.Before(expires) {
				holder = 0
			}
			for _, token := range []byte("01t") {
				if err := l.Check(now, "token"+string(token)); (err == nil) != (holder == token) {
					t.Fatalf("after %q at %d: token of %q: %v, held by %q", moves, at, token, err, holder)
				}
			}
			if l.Check(now, "") == nil {
				t.Fatal("no token opens it")
			}
			if now := l.See(now); (now.State == Leased) != (holder != 0) || (spoilt && now.State == Free) || now.Incarnation < before.Incarnation {
				t.Fatalf("%+v, held by %q, spoilt %v", now, holder, spoilt)
			}
		}
	})
}
