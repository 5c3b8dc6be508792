package pristine

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// runHere runs a program as the daemon would, but kills nobody.
func runHere(argv, env []string, folder, stdin string, timeout time.Duration) error {
	program := exec.Command(argv[0], argv[1:]...)
	program.Env, program.Dir, program.Stdin = append(env, "PATH="+os.Getenv("PATH")), folder, strings.NewReader(stdin)
	if output, err := program.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", argv[0], err, output)
	}
	return nil
}

func shell(t *testing.T, folder, line string) {
	t.Helper()
	program := exec.Command("sh", "-ec", line)
	program.Dir = folder
	program.Env = append(os.Environ(), "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=b", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=b", "GIT_CONFIG_GLOBAL=/dev/null")
	if output, err := program.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", line, err, output)
	}
}

// committed makes a repository of the sample, with files that git does not know too.
func committed(t *testing.T) string {
	t.Helper()
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("git is missing")
	}
	work := sample(t)
	shell(t, work, `git init -q -b main . && rm pipe data/hard && echo built > ignored.o && echo '*.o' > .gitignore &&
		git add -A && git commit -qm first && git tag v1 && git pack-refs --all && git branch other && echo local >> .git/info/exclude`)
	return work
}

// gitVandalism is what a tenant may do to a repository beside what it does to any folder.
var gitVandalism = map[string]string{
	"commit":             `echo x >> src/main.py && git commit -qam evil`,
	"branch and tag":     `git checkout -qb evil && git tag evil && git branch -D other`,
	"staged":             `echo x > staged && git add staged && git rm -q --cached src/main.py`,
	"stash":              `echo x >> src/main.py && git stash -q`,
	"config":             `git config user.name evil && git config core.fsmonitor ./evil`,
	"fsmonitor that ran": `printf '#!/bin/sh\ntouch ran\n' > src/f && chmod +x src/f && git config core.fsmonitor "$PWD/src/f" && git status -s && rm -f ran`,
	"hook":               `printf '#!/bin/sh\ntouch ran\n' > .git/hooks/post-checkout && chmod +x .git/hooks/post-checkout`,
	"hooks elsewhere":    `mkdir h && printf '#!/bin/sh\ntouch /tmp/ran\n' > h/post-checkout && chmod +x h/post-checkout && git config core.hooksPath h`,
	"filter":             `git config filter.evil.smudge 'touch ran; cat' && echo '* filter=evil' > .git/info/attributes && rm src/main.py`,
	"index is gone":      `rm .git/index`,
	"index is locked":    `touch .git/index.lock`,
	"references":         `rm .git/packed-refs .git/HEAD`,
	"assume unchanged":   `git update-index --assume-unchanged src/main.py && echo y >> src/main.py`,
	"skip worktree":      `git update-index --skip-worktree src/main.py && rm src/main.py`,
	"blob":               `echo secret | git hash-object -w --stdin`,
	"inner repository":   `mkdir inner && cd inner && git init -q . && git commit -q --allow-empty -m x`,
	"worktree":           `git worktree add -q ../wt-$$ && rm -rf ../wt-$$`,
	"ignored":            `echo x > new.o && echo '*.py' > .git/info/exclude && echo x > new.py`,
	"exclude":            `echo more >> .git/info/exclude`,
}

func TestRepositoryGoesBackToWhatItWas(t *testing.T) {
	work := committed(t)
	r, err := newRepository(work, nil, runHere)
	if err != nil {
		t.Fatal(err)
	}
	before := account(t, work)
	steps := map[string]func() error{}
	for name, line := range gitVandalism {
		steps[name] = func() error { shell(t, work, line); return nil }
	}
	for name, vandalize := range vandalism {
		if strings.Contains(name, "instead") || name == "remove all" || name == "link to a folder" || name == "hard link inside" {
			continue // below
		}
		steps["folder: "+name] = func() error { return vandalize(work) }
	}
	for name, vandalize := range steps {
		if name == "folder: remove" || name == "folder: rename" {
			shell(t, work, "test -e data/deep/er/x")
		}
		if err := vandalize(); err != nil {
			t.Fatal(name, err)
		}
		if err := next(r); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if changed := changes(before, account(t, work)); changed != "" {
			t.Fatalf("%s:\n%s", name, changed)
		}
	}
	shell(t, work, `test -z "$(git status --porcelain)" && git fsck --strict`)
}

func TestRepositoryThatGitCannotBringBackIsFound(t *testing.T) {
	for name, line := range map[string]string{
		"file that git does not know": `echo other > ignored.o`,
		"object":                      `rm -rf .git/objects/*`,
		"all":                         `rm -rf "$PWD"`,
		"link instead":                `mv "$PWD" "$PWD.away" && ln -s "$PWD.away" "$PWD"`,
	} {
		work := committed(t)
		r, err := newRepository(work, nil, runHere)
		if err != nil {
			t.Fatal(err)
		}
		shell(t, work, line+" && rm -f src/main.py")
		if err := next(r); err == nil {
			t.Errorf("%s: not found", name)
		}
	}
}

func TestWriteThroughAMappingIsSeen(t *testing.T) {
	folder, err := os.MkdirTemp(memory, "sandboxd-test-") // whose times do not tell of it
	if err != nil {
		t.Skip("needs a file system in memory: ", err)
	}
	defer os.RemoveAll(folder)
	for _, base := range []string{folder, t.TempDir()} {
		path := filepath.Join(base, "work", "x")
		write(t, path)
		tree, err := newTree("reset.paths", filepath.Dir(path), nil)
		if err != nil {
			t.Fatal(err)
		}
		sleepTick()
		file, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		mapped, err := syscall.Mmap(int(file.Fd()), 0, 1, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		file.Close()
		mapped[0] = 'y'
		_ = syscall.Munmap(mapped)
		if err := tree.verify(false); err == nil || !strings.Contains(err.Error(), "content differs") {
			t.Errorf("%s: %v", base, err)
		}
	}
}

func TestRepositoryIsCheckedAtStart(t *testing.T) {
	work := committed(t)
	shell(t, work, "mkdir -p ../bare && echo x >> src/main.py")
	for path, words := range map[string]string{work: "diff-files", filepath.Dir(work) + "/bare": "no folder .git"} {
		if _, err := newRepository(path, nil, runHere); err == nil || !strings.Contains(err.Error(), words) || !strings.Contains(err.Error(), "reset.git") {
			t.Errorf("%s: %v", path, err)
		}
	}
	missing := func([]string, []string, string, string, time.Duration) error { return fmt.Errorf("git ended with 127") }
	if _, err := newRepository(work, nil, missing); err == nil || !strings.Contains(err.Error(), "git must be in the image") {
		t.Error(err)
	}
}

// The command of the image.

func TestCommandBringsFoldersBackOrIsFoundWanting(t *testing.T) {
	work := sample(t)
	backup := t.TempDir()
	shell(t, backup, `cp -a "`+work+`/." .`)
	program := []string{"sh", "-c", fmt.Sprintf("rm -rf %[1]s/* && cp -a %[2]s/. %[1]s", work, backup)}
	p, err := newProgram(program, []string{work}, nil, runHere, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	before := account(t, work)
	for _, name := range []string{"write", "new file", "remove", "mode", "times", "same size, forged times"} {
		if err := vandalism[name](work); err != nil {
			t.Fatal(name, err)
		}
		if err := next(p); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if changed := changes(before, account(t, work)); changed != "" {
			t.Fatalf("%s:\n%s", name, changed)
		}
	}
	if err := vandalism["odd names"](backup); err != nil {
		t.Fatal(err)
	}
	if err := next(p); err == nil || !strings.Contains(err.Error(), "was added") {
		t.Error(err)
	}
}

func TestCommandIsTriedAtStart(t *testing.T) {
	work := sample(t)
	for line, words := range map[string]string{"exit 3": "exit status 3", "echo x > " + work + "/new": "was added"} {
		_, err := newProgram([]string{"sh", "-c", line}, []string{work}, nil, runHere, time.Minute)
		if err == nil || !strings.Contains(err.Error(), words) || !strings.Contains(err.Error(), "reset.command") {
			t.Errorf("%s: %v", line, err)
		}
		os.Remove(work + "/new")
	}
	if _, err := newProgram(nil, nil, nil, runHere, time.Minute); err == nil {
		t.Error("an empty command was accepted")
	}
}

func TestAutoTakesTheCheapest(t *testing.T) {
	all := Reset{Method: auto, Paths: []string{"/a"}, Git: "/b", Command: []string{"c"}}
	onlyGit, onlyCommand := Reset{Git: "/b", Command: []string{"c"}}, Reset{Command: []string{"c"}}
	for _, c := range []struct {
		reset Reset
		upper string
		want  string
	}{
		{all, "/u", overlay}, {all, "", paths}, {onlyGit, "", git}, {onlyCommand, "", command}, {Reset{}, "", recreate},
		{Reset{Method: paths}, "/u", overlay}, {Reset{Method: recreate}, "/u", recreate}, {Reset{Method: git, Paths: []string{"/a"}}, "", git},
	} {
		if got := c.reset.choose(c.upper, false); got != c.want {
			t.Errorf("%+v with upper %q: %s, want %s", c.reset, c.upper, got, c.want)
		}
	}
	for _, c := range []struct { // where the root is read-only
		reset Reset
		upper string
		want  string
	}{
		{Reset{}, "", emptying}, {Reset{Method: auto}, "", emptying}, {Reset{}, "/u", overlay}, {onlyCommand, "", command},
		{Reset{Method: recreate}, "", recreate},
	} {
		if got := c.reset.choose(c.upper, true); got != c.want {
			t.Errorf("%+v with upper %q, sealed: %s, want %s", c.reset, c.upper, got, c.want)
		}
	}
	for words, reset := range map[string]Reset{
		"reset.method: overlay": {Method: overlay}, "reset.method: \"magic\"": {Method: "magic", TimeoutSeconds: 1},
		"reset.timeoutSeconds": {Method: paths, Paths: []string{"/a"}}, "reset.method: scratch": {Method: emptying},
	} {
		if _, _, err := reset.prepare("", false, nil, nil); err == nil || !strings.HasPrefix(err.Error(), words) {
			t.Errorf("%s: %v", words, err)
		}
	}
}
